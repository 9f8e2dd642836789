"""A model's steps on tensors that have shapes and no bytes, and what each would take of a device."""
