"""The import server: a parent that has everything imported, from which starts are forked in milliseconds."""
