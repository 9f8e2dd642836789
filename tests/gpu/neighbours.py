"""Starts beside others: `python -m tests.gpu.neighbours MODEL [--cpu]`; prints one JSON line.

Two engines of 0.35 and 0.20: one after the other, the second while the first is under load, one second after the first
was killed, and both at once. Then a start of 0.5 beside a process that allocates, frees, and does both in turn.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.drive import Lines, Worker
from tests.gpu.promises import FEW_GRAPHS, NO_VERIFY, Findings, common

FIRST, SECOND, THIRD = "gpu.util=0.35", "gpu.util=0.2", "gpu.util=0.5"


def result_of(result: dict[str, Any], what: str, found: Findings, alone: int | None, within: float) -> int:
    """The KV cache's bytes; compared with those of a start that was alone, if given."""
    if "error" in result:
        found.expect(False, f"{what}: {result['error']}")
        return 0
    size = int(result["kv"]["bytes"])
    ledger = result["ledger"]
    found.rows.append(
        {
            "start": what,
            "kv_bytes": size,
            "alone_bytes": alone or size,
            "other_processes_bytes": ledger["other_processes_bytes"],
            "residual_bytes": ledger["residual_bytes"],
            "non_torch_bytes": ledger["accounts"]["non_torch"],
            "start_s": result["total_s"],
            "said": result["said"],
        }
    )
    if alone is not None:
        found.expect(abs(size - alone) <= within * alone, f"{what}: KV {size}, alone {alone}")
    return size


def two_engines(workers: Sequence[Worker], found: Findings) -> None:
    """Each worker makes one start, so that each pays for its own context."""
    first_alone, first, second_alone, second, loaded, killed, at_once, with_it = workers
    base = result_of(second_alone.start("one", SECOND), "0.20 alone", found, None, 0)
    second_alone.end()
    top = result_of(first_alone.start("one", FIRST), "0.35 alone", found, None, 0)
    first_alone.end()
    result_of(first.start("one", FIRST), "0.35 first", found, top, 0.02)
    result_of(second.start("one", SECOND), "0.20 after it", found, base, 0.02)
    second.end()
    first.ask("load", name="one", requests=32, max_tokens=64)
    result_of(loaded.start("one", SECOND), "0.20 while 0.35 is under load", found, base, 0.02)
    served = first.ask("unload")
    found.expect(not served["errors"] and served["served"] > 0, f"the load beside a start: {served}")
    loaded.end()
    first.kill()
    time.sleep(1)
    result_of(killed.start("one", SECOND), "0.20 one second after a kill", found, base, 0.02)
    killed.end()
    at_once.begin_start("one", FIRST)
    with_it.begin_start("one", SECOND)
    result_of(at_once.answer(), "0.35 at once", found, top, 0.02)
    result_of(with_it.answer(), "0.20 at once", found, base, 0.02)
    at_once.end()
    with_it.end()


def beside_a_restless_one(alone: Worker, workers: Sequence[Worker], restless: Lines, found: Findings) -> None:
    base = result_of(alone.start("one", THIRD), "0.5 alone", found, None, 0)
    alone.end()
    for worker, habit in zip(workers, ("grow", "shrink", "saw"), strict=True):
        restless.write(habit)
        restless.read()
        result_of(worker.start("one", THIRD), f"0.5 beside one that does: {habit}", found, base, 0.01)
        worker.end()
        restless.write("stop")
        restless.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--cpu", action="store_true", help="the embedded model, to try this program without a GPU")
    given = parser.parse_args()
    overrides = [*common(given.model, given.cpu), NO_VERIFY, FEW_GRAPHS]
    found = Findings()
    with tempfile.TemporaryDirectory() as scratch:
        # All import at the same time; none has a context before it is told to start.
        workers = [Worker(Path(scratch), overrides) for _ in range(12)]
        restless = Lines("tests.gpu.restless", *(["--cpu"] if given.cpu else []))
        try:
            restless.read()
            pids = [worker.pid for worker in workers]
            two_engines(workers[:8], found)
            beside_a_restless_one(workers[8], workers[9:], restless, found)
        finally:
            for each in (*workers, restless):
                each.kill()
    print(json.dumps({"model": given.model, "starts": found.rows, "processes": len(pids), "broken": found.broken}))
    sys.exit(1 if found.broken else 0)


if __name__ == "__main__":
    main()
