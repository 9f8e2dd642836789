"""Where the time of serving goes, step by step: the load of `tests.gpu.throughput`, and decoding; prints one JSON line.

For each kind of step: how many, seconds on the host between steps and inside them, and what the device was busy with.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from orchestrator import Request, start
from orchestrator.engine.step import Step
from tests.gpu.step_profile import attempt
from tests.gpu.throughput import OVERRIDES, image_requests, text_requests
from tests.gpu.trace import profiled


class Stopwatch:
    """Times each step of an engine, and what lies between two."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._execute = engine, engine._execute
        self.rows: list[dict[str, Any]] = []
        self._left = time.perf_counter()
        engine._execute = self._timed

    def _timed(self, step: Step, *others: Any) -> Any:
        begin = time.perf_counter()
        result = self._execute(step, *others)
        end = time.perf_counter()
        decodes = sum(chunk.decode for chunk in step.chunks)
        self.rows.append(
            {
                "kind": "decode" if decodes == len(step.chunks) else "mixed" if decodes else "prefill",
                "decodes": decodes,
                "tokens": step.num_tokens,
                "encoded": sum(item.num_embeds for item in step.encode),
                "items": len(step.encode),
                "with_context": sum(chunk.start > 0 and not chunk.decode for chunk in step.chunks),
                "before_s": round(begin - self._left, 5),
                "inside_s": round(end - begin, 5),
            }
        )
        self._left = end
        return result

    def run(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Of one `generate`."""
        self.rows, self._left = [], time.perf_counter()
        begin = time.perf_counter()
        retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        self._engine.generate(list(requests))
        whole = time.perf_counter() - begin
        kinds: dict[str, Counter[str]] = {}
        for row in self.rows:
            kinds.setdefault(row["kind"], Counter()).update(
                {"steps": 1, **{name: row[name] for name in ("tokens", "encoded", "before_s", "inside_s")}}
            )
        decoding = [row for row in self.rows if row["kind"] == "decode"]
        return {
            "whole_s": whole,
            "after_the_last_step_s": time.perf_counter() - self._left,
            "alloc_retries": torch.cuda.memory_stats().get("num_alloc_retries", 0) - retries,
            "kinds": {kind: {name: round(value, 4) for name, value in each.items()} for kind, each in kinds.items()},
            "decode_step_median_s": median(row["before_s"] + row["inside_s"] for row in decoding) if decoding else None,
            "decode_between_median_s": median(row["before_s"] for row in decoding) if decoding else None,
            "other_steps": [row for row in self.rows if row["kind"] != "decode"][:40],
        }


def images(watch: Stopwatch, engine: Any) -> dict[str, Any]:
    engine.clear_caches()
    first = watch.run(image_requests(64, 128))
    engine.clear_caches()
    second = watch.run(image_requests(64, 128))
    engine.clear_caches()
    short_run = image_requests(64, 4)
    device = profiled(lambda: engine.generate(short_run))
    return {"first": first, "second": second, "device_with_4_tokens_out": device}


def decoding(watch: Stopwatch) -> dict[str, Any]:
    return {str(count): watch.run(text_requests(count, 120, 48)) for count in (256, 64, 8, 1)}


def main() -> None:
    with start([*OVERRIDES, *sys.argv[1:]]) as started:
        engine: Any = started.engine
        watch = Stopwatch(engine)
        engine.generate(image_requests(8, 8))
        record = started.record
        capture = next((stage.wall_s for stage in record.stages if stage.slot == "graph_capture"), None)
        result = {
            "torch": torch.__version__,
            "capture_s": capture,
            "ready_s": record.ready_s,
            "images": attempt(lambda: images(watch, engine)),
            "decoding": attempt(lambda: decoding(watch)),
            "stats": {
                name: value
                for name, value in torch.cuda.memory_stats().items()
                if name in ("num_alloc_retries", "num_device_alloc", "num_device_free", "num_sync_all_streams")
            },
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
