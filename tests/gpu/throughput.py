"""Requests a second of the started engine, and the time of its steps; prints one JSON line.

64 requests at once, each with one image of plain colour and a short text, 128 tokens out, greedy: the load that other
engines were measured with on the same card.
"""

from __future__ import annotations

import json
import random
import sys
import time
from statistics import median
from typing import Any

from PIL import Image

from orchestrator import Engine, Media, Request, start

SIZES = ((1792, 1344), (448, 448), (5376, 448), (1000, 700), (2240, 896))
OVERRIDES = (
    "device=cuda",
    "model=internvl2_5_8b",
    "model.load_format=dummy",
    "gpu.util=0.99",
    "graphs.mode=keep",
    "scheduler.max_model_len=32768",
    "scheduler.max_num_batched_tokens=16384",
    "stages.verify.mode=off",
)


def image_requests(count: int, max_tokens: int) -> list[Request]:
    rng = random.Random(0)
    requests = []
    for number in range(count):
        colour = (rng.randrange(256), rng.randrange(256), rng.randrange(256))
        picture = Image.new("RGB", rng.choice(SIZES), colour)
        media = (Media("image", picture),)
        requests.append(Request(str(number), "What colour is this?", media, max_tokens, ignore_eos=True))
    return requests


def text_requests(count: int, words: int, max_tokens: int) -> list[Request]:
    return [Request(f"text-{number}", " a" * words, (), max_tokens, ignore_eos=True) for number in range(count)]


def seconds(engine: Engine, requests: list[Request]) -> float:
    begin = time.perf_counter()
    outputs = engine.generate(requests)
    spent = time.perf_counter() - begin
    assert all(len(output.token_ids) == requests[0].max_tokens for output in outputs)
    return spent


def decode_step(engine: Engine, sequences: int, words: int) -> float:
    """Seconds of one step that decodes so many sequences: what 32 more tokens of each cost."""
    short, long = (seconds(engine, text_requests(sequences, words, tokens)) for tokens in (8, 40))
    return (long - short) / 32


def main() -> None:
    with start([*OVERRIDES, *sys.argv[1:]]) as started:
        engine = started.engine
        seconds(engine, image_requests(8, 8))
        runs = []
        for _ in range(3):
            engine.clear_caches()
            runs.append(seconds(engine, image_requests(64, 128)))
        spent = median(runs)
        prefill = [seconds(engine, text_requests(1, 4090, 1)) for _ in range(3)]
        result: dict[str, Any] = {
            "blocks": started.record.kv_cache.num_gpu_blocks if started.record.kv_cache else None,
            "seconds": runs,
            "requests_per_s": 64 / spent,
            "tokens_per_s": 64 * 128 / spent,
            "again_with_media_cached_s": seconds(engine, image_requests(64, 128)),
            "decode_256_of_about_256_s": decode_step(engine, 256, 120),
            "prefill_of_about_8192_s": min(prefill),
            "prompt_tokens": engine.prompt_tokens(text_requests(1, 4090, 1)[0]),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
