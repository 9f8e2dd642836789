"""Models from a hub: what it has, what is here already, and the bytes that are missing.

The files go where huggingface_hub keeps them, so other programs find them and theirs are found. Its own download is not
used: it begins a file again that was interrupted, and waits without limit for a hub that does not answer.
"""
