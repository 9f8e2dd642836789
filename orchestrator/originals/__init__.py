"""Checkpoints in the layout that their authors published, read into transformers' own classes without running code that
came with them. Nothing here imports torch."""
