"""The built-in stages. None imports another: they meet only through the keys in `artifacts`."""
