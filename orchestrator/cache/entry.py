"""What an entry of the disk cache is, as a value and as bytes, and the fingerprint that finds it.

The bytes are the magic, a version, zeros, the SHA-256 of the payload, and at byte 64 the payload: safetensors bytes
whose `__metadata__` holds the key and the JSON.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.cache.layout import DIGEST_AT, MAGIC, VERSION

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Entry:
    """What is kept: tensors, which come back contiguous and on the CPU, and a JSON object.

    Tensors that come back from the disk lie in its file, which is mapped and not copied: what writes to one of them
    gets a copy of its own.
    """

    tensors: dict[str, torch.Tensor]
    meta: dict[str, Any]


def fingerprint(parts: Mapping[str, Any]) -> str:
    """The SHA-256, in hexadecimal, of `parts` as JSON with sorted names.

    Raises:
        TypeError: a part that JSON cannot say without loss; names it.
    """
    return hashlib.sha256(_json(parts, "fingerprint").encode()).hexdigest()


def encode(key: str, entry: Entry) -> bytes:
    import torch
    from safetensors.torch import save

    tensors = {
        # Cloned, because safetensors refuses tensors that share memory.
        name: tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format)
        for name, tensor in entry.tensors.items()
    }
    payload = save(tensors, {"key": key, "meta": _json(entry.meta, "meta")})
    head = (MAGIC + bytes([VERSION])).ljust(DIGEST_AT, b"\0")
    return b"".join((head, hashlib.sha256(payload).digest(), payload))


def as_read(entry: Entry) -> Entry:
    """`entry` with the JSON as a later reader will get it: tuples are lists."""
    return Entry(entry.tensors, json.loads(_json(entry.meta, "meta")))


def _json(value: Any, where: str) -> str:
    return json.dumps(_plain(value, where), sort_keys=True, separators=(",", ":"))


def _plain(value: Any, where: str) -> Any:
    """
    Raises:
        TypeError: not JSON; a name that is not text would silently become text, so it is refused too.
    """
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise TypeError(f"{where} has the name {name!r}, which is not text")
        return {name: _plain(item, f"{where}.{name}") for name, item in value.items()}
    raise TypeError(f"{where} is {value!r}, a {type(value).__name__}; JSON has text, finite numbers, lists and objects")
