"""What an entry of the disk cache is, as a value and as bytes, and the fingerprint that finds it.

The bytes are the magic, a version, the SHA-256 of the payload, and the payload: safetensors bytes whose `__metadata__`
holds the key and the JSON.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.errors import CacheError

if TYPE_CHECKING:
    import torch

_MAGIC = b"orchestrator-cache"
_VERSION = 1
_DIGEST_AT = len(_MAGIC) + 1
_PAYLOAD_AT = _DIGEST_AT + hashlib.sha256().digest_size


@dataclass(frozen=True)
class Entry:
    """What is kept: tensors, which come back contiguous and on the CPU, and a JSON object."""

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
    return b"".join((_MAGIC, bytes([_VERSION]), hashlib.sha256(payload).digest(), payload))


def decode(data: bytes, key: str) -> Entry:
    """
    Raises:
        CacheError: not exactly what `encode` wrote for `key`; says what is wrong.
    """
    if not data.startswith(_MAGIC) or len(data) < _PAYLOAD_AT:
        raise CacheError("it has no header of this cache")
    if data[len(_MAGIC)] != _VERSION:
        raise CacheError(f"it has format version {data[len(_MAGIC)]}, and this program reads {_VERSION}")
    payload = data[_PAYLOAD_AT:]
    if hashlib.sha256(payload).digest() != data[_DIGEST_AT:_PAYLOAD_AT]:
        raise CacheError("its bytes are not those that were written")
    from safetensors.torch import load

    try:
        header = json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])
        written_for, meta = header["__metadata__"]["key"], json.loads(header["__metadata__"]["meta"])
        tensors = load(payload)
    except Exception as error:
        raise CacheError(f"it cannot be read ({error})") from error
    if written_for != key or not isinstance(meta, dict):
        raise CacheError("it was written for another key")
    return Entry(tensors, meta)


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
