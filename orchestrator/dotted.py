"""Trees of settings by dotted names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """What is in the mappings of a tree and is none itself, by its dotted name; an empty mapping is a leaf.

    Args:
        name: of the tree.
    """
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from leaves(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, tree
