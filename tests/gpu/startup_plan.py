"""What a start-up plan saves: a start that learns, one that takes over, and one whose plan says half of a peak, each in
a new process; one JSON line.

    python -m tests.gpu.startup_plan [OVERRIDE ...]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from orchestrator.cache import Cache
from orchestrator.units import GiB
from tests.gpu.sources import ROOT
from tests.starts import environment

LEARNS, TAKES_OVER, HALVED = "learns", "takes over", "half of a peak"
_TAIL = 2000


def start(folder: Path, name: str, overrides: list[str], verify: str) -> dict[str, Any]:
    """A start in a new process; what its record says, and the end of its output if it failed."""
    place = folder / name.replace(" ", "_")
    more = [f"cache.dir={folder / 'cache'}", f"run.dir={place}", f"stages.verify.mode={verify}"]
    command = [sys.executable, "-m", "orchestrator", *overrides, *more]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    path = place / "run.json"
    found = row(json.loads(path.read_text())) if path.is_file() else {}
    warnings = [line for line in (done.stderr + done.stdout).splitlines() if "does not hold" in line]
    failed = {} if done.returncode == 0 else {"output": (done.stdout + done.stderr)[-_TAIL:]}
    return {"start": name, "exit_code": done.returncode, **found, "said": warnings, **failed}


def row(record: dict[str, Any]) -> dict[str, Any]:
    stages = {stage["slot"]: stage for stage in record["stages"]}
    ledger, kv = record["ledger"] or {}, record["kv_cache"] or {}
    return {
        "plan": {slot: stage["metrics"].get("startup_plan") for slot, stage in stages.items()},
        "seconds": {slot: stage["wall_s"] for slot, stage in stages.items()},
        "spans": {slot: {span["name"]: span["wall_s"] for span in stage["spans"]} for slot, stage in stages.items()},
        "import_s": record["import_s"],
        "ready_s": record["ready_s"],
        "total_s": record["total_s"],
        "num_gpu_blocks": kv.get("num_gpu_blocks"),
        "limited_by": kv.get("limited_by"),
        "accounts": ledger.get("accounts"),
        "residual_bytes": ledger.get("residual_bytes"),
        "requested_bytes": ledger.get("requested_bytes"),
        "peak_held_bytes": ledger.get("peak_held_bytes"),
        "peaks_bytes": stages.get("profile_run", {}).get("metrics", {}).get("peaks_bytes"),
        "rehearsed_bytes": stages.get("allocate_kv", {}).get("metrics", {}).get("rehearsed_bytes"),
    }


def halve_the_highest_peak(folder: Path) -> str:
    """Write the only plan of a cache again, with half of what it says of the part that sets the peak; that part."""
    with Cache(folder, max_bytes=2 * GiB, warn=lambda line: print(line, file=sys.stderr)) as cache:
        for key in cache.keys():  # noqa: SIM118 - a cache is no mapping
            entry = cache.get(key)
            if entry is None or "facts" not in entry.meta:
                continue
            parts = entry.meta["facts"]["measured"]["parts"]
            highest = max(parts, key=lambda name: parts[name]["reserved"])
            for figure in ("above", "reserved"):
                parts[highest][figure] //= 2
            cache.put(key, entry)
            return str(highest)
    return "no plan was kept"


def main(overrides: list[str]) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows = [start(folder, LEARNS, overrides, "off"), start(folder, TAKES_OVER, overrides, "quick")]
        halved = halve_the_highest_peak(folder / "cache")
        rows.append(start(folder, HALVED, overrides, "off"))
    blocks = [each["num_gpu_blocks"] for each in rows if each.get("num_gpu_blocks") is not None]
    spread = max(blocks) - min(blocks) if blocks else None
    print(json.dumps({"overrides": overrides, "rows": rows, "halved": halved, "blocks_apart": spread}))
    return 0 if all(each["exit_code"] == 0 for each in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
