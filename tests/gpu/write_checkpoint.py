"""A model folder of the real size with random weights, written fast.

    python -m tests.gpu.write_checkpoint MODEL FOLDER

Configuration, tokenizer and processor are the project's own makers'. Matrices are slices of one random block, biases
zero and scales one, so that answers stay finite; the bytes are the same each time. Prints the seconds and the bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from orchestrator.engine.build import _model_class
from orchestrator.registry import Registry
from orchestrator.tensorfile import INDEX_NAME
from orchestrator.units import GiB, MiB

_BLOCK_BYTES = 64 * MiB
_STEP_BYTES = 8 * MiB
_SHARD_BYTES = 5 * GiB
_STD = 0.02
_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    nbytes: int


def write_checkpoint(
    model: str, folder: Path, *, dtype: torch.dtype = torch.bfloat16, layers: int | None = None, threads: int = 16
) -> int:
    """Write the folder of a model that the registry has a maker for.

    Args:
        layers: of the language model, for a smaller one; None for all.

    Returns:
        The bytes of the weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    Registry.discover().resolve("models", model)().make(folder)
    if layers is not None:
        _shorten(folder / "config.json", layers)
    return write_weights(folder, _tensors(folder, dtype), dtype, threads)


def write_weights(folder: Path, tensors: Sequence[Tensor], dtype: torch.dtype, threads: int = 16) -> int:
    """Write tensors of that name and shape, in shards with an index; their bytes in all."""
    shards = _shards(tensors)
    block = _block(dtype)
    weight_map: dict[str, str] = {}
    with ThreadPoolExecutor(threads) as pool:
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
            weight_map.update({tensor.name: name for tensor in shard})
            _write_shard(folder / name, shard, dtype, block, pool)
    total = sum(tensor.nbytes for tensor in tensors)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return total


def _shorten(path: Path, layers: int) -> None:
    config = json.loads(path.read_text())
    config.get("text_config", config)["num_hidden_layers"] = layers
    path.write_text(json.dumps(config))


def _tensors(folder: Path, dtype: torch.dtype) -> list[Tensor]:
    """What the model's state dict holds, tied weights once."""
    config: Any = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = _model_class(config, folder)._from_config(config, dtype=dtype)
    model.tie_weights()
    return [Tensor(name, tuple(each.shape), each.nbytes) for name, each in model.named_parameters()]


def _shards(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    shards: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _block(dtype: torch.dtype) -> memoryview:
    """Twice the same random bytes, so that a step may begin anywhere in the first half."""
    generator = torch.Generator().manual_seed(0)
    count = _BLOCK_BYTES // dtype.itemsize
    values = torch.empty(count, dtype=torch.float32).normal_(0.0, _STD, generator=generator).to(dtype)
    array: Any = values.repeat(2).view(torch.uint8).numpy()
    return memoryview(array)


def _write_shard(path: Path, tensors: list[Tensor], dtype: torch.dtype, block: memoryview, pool: Any) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        header[tensor.name] = {"dtype": _NAMES[dtype], "shape": tensor.shape, "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    try:
        os.ftruncate(descriptor, 8 + len(text) + at)
        os.pwrite(descriptor, len(text).to_bytes(8, "little") + text, 0)
        writes = []
        for number, tensor in enumerate(tensors):
            place = 8 + len(text) + header[tensor.name]["data_offsets"][0]
            data = _constant(tensor, dtype) if len(tensor.shape) < 2 else None
            for start in range(0, tensor.nbytes, _STEP_BYTES):
                size = min(_STEP_BYTES, tensor.nbytes - start)
                # Another place in the block for each tensor and step, at a whole element.
                begin = (number * 7919 + start // _STEP_BYTES * 104729) * 512 % _BLOCK_BYTES
                part = data[start : start + size] if data is not None else block[begin : begin + size]
                writes.append(pool.submit(_pwrite, descriptor, part, place + start))
        for write in writes:
            write.result()
    finally:
        os.close(descriptor)


def _constant(tensor: Tensor, dtype: torch.dtype) -> memoryview:
    value = 0.0 if "bias" in tensor.name.rpartition(".")[2] else 1.0
    array: Any = torch.full((math.prod(tensor.shape),), value, dtype=dtype).view(torch.uint8).numpy()
    return memoryview(array)


def _pwrite(descriptor: int, data: memoryview, place: int) -> None:
    while len(data):
        count = os.pwrite(descriptor, data, place)
        data, place = data[count:], place + count


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.write_checkpoint", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="of the language model, for a smaller one")
    arguments = parser.parse_args()
    start = time.monotonic()
    total = write_checkpoint(arguments.model, arguments.folder, layers=arguments.layers)
    print(json.dumps({"bytes": total, "seconds": round(time.monotonic() - start, 2)}))


if __name__ == "__main__":
    main()
