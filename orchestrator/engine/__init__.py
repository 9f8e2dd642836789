"""Who runs the model: transformers' own model code over a paged KV cache of ours."""
