"""What the costliest items cost, by family with the settings of real models, and dummy data: made, fetched, kept.

`python -m tests.benchmarks.dummy_data [--max-model-len N] [--made]` prints tables in Markdown. Tokens are counted by
the profilers, bytes on what the real processor makes. `--made` adds, for images, the seconds to make one and to fetch
it in this process and in the next, its bytes on disk, and by how much the resident set of the next process grows.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from orchestrator.cache import Cache, Entry
from orchestrator.compose import compose
from orchestrator.registry import Registry
from orchestrator.units import GiB, format_size
from tests.media_processors import REAL_SIZE, RealSize, processed

_MODEL_INPUTS = ("pixel_values", "pixel_values_videos", "input_features")
_FETCH = """
import sys, time, torch
from pathlib import Path
import psutil
from orchestrator.cache import Cache
with Cache(Path(sys.argv[1]), max_bytes=1 << 40, warn=print) as cache:
    rss, start = psutil.Process().memory_info().rss, time.monotonic()
    found = cache.get(sys.argv[2])
    print(time.monotonic() - start, psutil.Process().memory_info().rss - rss)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-model-len", type=int, default=32768)
    parser.add_argument("--made", action="store_true")
    arguments = parser.parse_args()
    print("| family | modality | most tokens: shape | tokens | most bytes: shape | bytes in bfloat16 |")
    print("|---|---|---|---|---|---|")
    for family in REAL_SIZE:
        for modality in family.marks:
            print(costs(family, modality, arguments.max_model_len), flush=True)
    if arguments.made:
        print("\n| family | made, s | fetched here, s | fetched by the next process, s | on disk | its RSS grows by |")
        print("|---|---|---|---|---|---|")
        for family in REAL_SIZE:
            if "image" in family.marks:
                print(made(family, arguments.max_model_len), flush=True)


def profiler(family: RealSize, processor: Any, max_model_len: int) -> Any:
    make = Registry.discover().resolve("profilers", family.name)
    return make(processor, SimpleNamespace(), compose([]).config.mm, max_model_len)


def costs(family: RealSize, modality: str, max_model_len: int) -> str:
    processor = family.make()
    ours = profiler(family, processor, max_model_len)
    most_tokens, most_bytes = ours.costliest(modality), ours.heaviest(modality)
    item = as_input(processor, family, modality, ours.build(most_bytes))
    size = sum(tensor.numel() * 2 for name, tensor in item.items() if name in _MODEL_INPUTS)
    shapes = [" x ".join(map(str, spec.shape)) for spec in (most_tokens, most_bytes)]
    return f"| {family.name} | {modality} | {shapes[0]} | {most_tokens.tokens:,} | {shapes[1]} | {format_size(size)} |"


def as_input(processor: Any, family: RealSize, modality: str, data: Any) -> dict[str, torch.Tensor]:
    import numpy as np

    frames = np.stack([np.asarray(frame) for frame in data]) if isinstance(data, list) else data
    return processed(processor, modality, family.marks[modality], frames)


def made(family: RealSize, max_model_len: int) -> str:
    processor = family.make()
    ours = profiler(family, processor, max_model_len)
    spec = ours.heaviest("image")

    def build() -> Entry:
        item = as_input(processor, family, "image", ours.build(spec))
        tensors = {name: each.to(torch.bfloat16) for name, each in item.items() if name in _MODEL_INPUTS}
        return Entry(tensors, {"token_ids": item["input_ids"].flatten().tolist()})

    with tempfile.TemporaryDirectory() as folder, Cache(Path(folder), max_bytes=100 * GiB, warn=print) as cache:
        seconds = [timed(lambda: cache.fetch("key", build)) for _ in range(2)]
        size = cache.entry_bytes("key") or 0
        command = [sys.executable, "-c", _FETCH, folder, "key"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    next_s, growth = done.stdout.split()
    numbers = f"{seconds[0]:.2f} | {seconds[1]:.4f} | {float(next_s):.4f}"
    return f"| {family.name} | {numbers} | {format_size(size)} | {format_size(int(growth))} |"


def timed(call: Callable[[], Any]) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start


if __name__ == "__main__":
    main()
