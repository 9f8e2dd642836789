"""From a checkpoint in its authors' layout to the small files that transformers reads."""
