"""Whether a start keeps its promises, watched from outside:
`python -m tests.gpu.promises MODEL [--quick] [--parts A,B] [--cpu]`.

Prints one JSON line: for each start the share, the ceiling, the peak that the process really held (read every 10 ms,
from before the start until it has served a load), KV cache, free memory and residual; then what is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.units import MiB
from tests.gpu.drive import Watch, Worker

RESIDUAL = 64 * MiB
FEW_GRAPHS = "graphs.sizes=[8,1]"
NO_VERIFY = "~stage@stages.verify"
PARTS = ("ceilings", "capture_lists", "given_back", "nearly_equal_limits", "several", "unlisted")
QUICK_SHARES = [(0.99, "keep"), (0.3, "keep"), (0.9, "none")]


@dataclass
class Findings:
    """Rows of the table, and sentences about what was broken."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.broken.append(what)


def common(model: str, cpu: bool) -> list[str]:
    """Overrides of every start: of a model with random weights on the GPU, or of the embedded one on a CPU."""
    if cpu:
        small = ["scheduler.max_model_len=256", "scheduler.max_num_seqs=4", "mm.processor_kwargs={max_patches: 1}"]
        return ["device=cpu", "kv.bytes=auto", "gpu.total_bytes=16GiB", *small]
    return ["device=cuda", f"model={model}", "model.load_format=dummy", "kv.bytes=auto", "graphs.mode=keep"]


def ceilings(worker: Worker, watch: Watch, shares: Sequence[tuple[float, str]], found: Findings) -> None:
    """Never above the share, from before the start through a load; the KV cache takes what is left."""
    for util, mode in shares:
        base = watch.take()["now_bytes"]
        result = worker.start("one", f"gpu.util={util}", f"graphs.mode={mode}")
        name = f"util {util}, graphs {mode}"
        if "error" in result:
            found.expect(False, f"{name}: {result['error']}")
            continue
        served = under_load(worker, "one", requests=32)
        seen = watch.take()
        ledger, kv = result["ledger"], result["kv"]
        held = seen["peak_bytes"] - base
        left = ledger["requested_bytes"] - needs(ledger)
        found.rows.append(
            {
                "util": util,
                "graphs": mode,
                "total_bytes": ledger["total_bytes"],
                "requested_bytes": ledger["requested_bytes"],
                "peak_bytes": held,
                "kv_bytes": kv["bytes"],
                "left_bytes": left,
                "free_bytes": ledger["total_bytes"] - ledger["other_processes_bytes"] - ledger["held_bytes"],
                "residual_bytes": ledger["residual_bytes"],
                "accounts": ledger["accounts"],
                "start_s": result["total_s"],
                "readings": seen["readings"],
                "longest_gap_s": seen["longest_gap_s"],
            }
        )
        source = ledger["source"]
        found.expect(held <= ledger["requested_bytes"] or source == "rss", f"{name}: held {held} bytes")
        found.expect(kv["bytes"] >= 0.98 * left or source == "rss", f"{name}: KV {kv['bytes']} of {left} left")
        found.expect(abs(ledger["residual_bytes"]) <= RESIDUAL or source == "rss", f"{name}: residual")
        found.expect(not served["errors"], f"{name}: {served['errors']}")
        worker.ask("close", name="one")


def needs(ledger: dict[str, Any]) -> int:
    """What is charged besides the KV cache."""
    return sum(size for account, size in ledger["accounts"].items() if account != "kv_cache")


def under_load(worker: Worker, name: str, requests: int) -> dict[str, Any]:
    worker.ask("load", name=name, requests=requests, max_tokens=24)
    return worker.ask("unload")


def several_in_one_process(worker: Worker, found: Findings) -> dict[str, Any]:
    """Three engines of 0.3, one dropped and another started; then two of 0.25."""
    caches: dict[str, int] = {}
    non_torch: list[int] = []
    for step, util in (("a", 0.3), ("b", 0.3), ("c", 0.3), ("-b", 0), ("d", 0.3), ("-a", 0), ("-c", 0), ("-d", 0)):
        if step.startswith("-"):
            if caches[step[1:]]:
                worker.ask("close", name=step[1:])
            continue
        caches[step] = kv_of(worker, step, found, f"gpu.util={util}", non_torch=non_torch)
    for step in ("e", "f"):
        caches[step] = kv_of(worker, step, found, "gpu.util=0.25", non_torch=non_torch)
    for step in ("e", "f"):
        if caches[step]:
            worker.ask("close", name=step)
    found.expect(min(non_torch) >= 0, f"non-torch {non_torch}")
    found.expect(caches["d"] >= 0.98 * caches["b"], f"what was dropped is not used again: {caches}")
    return {"kv_bytes": caches, "non_torch_bytes": non_torch}


def kv_of(worker: Worker, name: str, found: Findings, *overrides: str, non_torch: list[int] | None = None) -> int:
    """The KV cache's bytes of an engine that is started and kept; 0 if it does not start."""
    result = worker.start(name, NO_VERIFY, FEW_GRAPHS, *overrides)
    found.expect("error" not in result, f"{name} {overrides}: {result.get('error')}")
    if "error" in result:
        return 0
    if non_torch is not None:
        non_torch.append(result["ledger"]["accounts"]["non_torch"])
    return int(result["kv"]["bytes"])


def capture_lists(worker: Worker, found: Findings, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """What is charged for graphs is what the process grew by; nothing where there are none."""
    rows = []
    for length in lengths:
        sizes = ",".join(str(size) for size in range(length, 0, -1))
        graphs = [f"graphs.sizes=[{sizes}]"] if length else ["graphs.mode=none"]
        result = worker.start("one", NO_VERIFY, "gpu.util=0.5", "scheduler.max_num_seqs=67", *graphs)
        if "error" in result:
            found.expect(False, f"{length} graphs: {result['error']}")
            continue
        worker.ask("close", name="one")
        charged, grew = result["ledger"]["accounts"]["cudagraph"], result["capture_grew_bytes"] or 0
        rows.append({"sizes": length, "charged_bytes": charged, "grew_bytes": grew})
        found.expect(abs(charged - max(0, grew)) <= 8 * MiB, f"{length} graphs: charged {charged}, grew {grew}")
        found.expect(length > 0 or charged == 0, f"no graphs and {charged} bytes charged")
    return rows


def given_back(worker: Worker, found: Findings) -> list[int]:
    """The bytes that a run reports, as `kv.bytes`, three rounds."""
    sizes: list[int] = []
    for _ in range(4):
        given = [f"kv.bytes={sizes[-1]}"] if sizes else []
        sizes.append(kv_of(worker, "one", found, "gpu.util=0.5", *given))
        if not sizes[-1]:
            return sizes
        worker.ask("close", name="one")
    found.expect(max(sizes) <= 1.01 * min(sizes), f"kv.bytes given back: {sizes}")
    return sizes


def nearly_equal_limits(worker: Worker, found: Findings) -> list[dict[str, Any]]:
    """69 and 70 sequences, with a garbage collection in the middle and without."""
    rows = []
    for collect in (False, True):
        for seqs in (69, 70):
            limits = (f"scheduler.max_num_seqs={seqs}", "gpu.util=0.5", FEW_GRAPHS, "pipeline=profile_only")
            result = worker.start("one", *limits)
            peak = result.get("peak_activation_bytes")
            found.expect(peak is not None, f"{seqs} sequences: {result.get('error')}")
            rows.append({"max_num_seqs": seqs, "collected": collect, "peak_activation_bytes": peak or 0})
            if "error" not in result:
                worker.ask("close", name="one")
            if collect:
                worker.ask("collect")
    peaks = [row["peak_activation_bytes"] for row in rows]
    if (result.get("ledger") or {}).get("source") == "rss":
        # A resident set is too coarse for this.
        return rows
    found.expect(max(peaks) <= 1.02 * min(peaks), f"peaks of 69 and 70 sequences: {peaks}")
    found.expect(peaks[0] <= peaks[1] and peaks[2] <= peaks[3], f"peaks are not monotone: {peaks}")
    return rows


def unlisted(folder: Path, overrides: Sequence[str], found: Findings) -> dict[str, Any]:
    """A process that the driver does not tell apart: the documented fallback, and no negative account."""
    with Worker(folder, overrides) as worker:
        worker.ask("hide")
        result = worker.start("one", NO_VERIFY, FEW_GRAPHS, "gpu.util=0.5")
        found.expect("error" not in result, f"unlisted: {result.get('error')}")
        ledger = result.get("ledger") or {"accounts": {"kv_cache": 0}, "source": "", "source_reason": ""}
        found.expect(ledger["source"] in ("device_delta", "rss"), f"unlisted: read from {ledger['source']}")
        found.expect(min(ledger["accounts"].values()) >= 0, f"unlisted: {ledger['accounts']}")
        return {key: ledger[key] for key in ("source", "source_reason", "accounts")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--quick", action="store_true", help="fewer starts, for a model that loads slowly")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=PARTS, help=f"of {','.join(PARTS)}")
    parser.add_argument("--cpu", action="store_true", help="the embedded model, to try this program without a GPU")
    given = parser.parse_args()
    unknown = set(given.parts) - set(PARTS)
    if unknown:
        parser.error(f"--parts: {','.join(sorted(unknown))} is none of {','.join(PARTS)}")
    found, overrides = Findings(), common(given.model, given.cpu)
    result: dict[str, Any] = {"model": given.model}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if set(given.parts) - {"unlisted"}:
            with Worker(folder, overrides) as worker, Watch(worker.pid, cpu=given.cpu) as watch:
                in_one_process(worker, watch, given.parts, given.quick, result, found)
        if "unlisted" in given.parts and not given.quick:
            result["unlisted"] = unlisted(folder, overrides, found)
    print(json.dumps({**result, "starts": found.rows, "broken": found.broken}))
    sys.exit(1 if found.broken else 0)


def in_one_process(
    worker: Worker, watch: Watch, parts: Sequence[str], quick: bool, result: dict[str, Any], found: Findings
) -> None:
    """The chosen parts that need only one process, one after the other."""
    if "ceilings" in parts:
        ceilings(worker, watch, QUICK_SHARES if quick else all_shares(), found)
    if "capture_lists" in parts:
        result["capture_lists"] = capture_lists(worker, found, (8, 0) if quick else (1, 8, 35, 67, 0))
    if "given_back" in parts:
        result["kv_bytes_given_back"] = given_back(worker, found)
    if "nearly_equal_limits" in parts:
        result["nearly_equal_limits"] = nearly_equal_limits(worker, found)
    if "several" in parts and not quick:
        result["several_in_one_process"] = several_in_one_process(worker, found)


def all_shares() -> list[tuple[float, str]]:
    """The greatest first: in a process that holds nothing yet."""
    return [(util, mode) for mode in ("keep", "none") for util in (0.99, 0.97, 0.9, 0.7, 0.5, 0.3)]


if __name__ == "__main__":
    main()
