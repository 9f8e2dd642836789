"""The experiment `encoder_budget`, each point in a process of its own, forked from the import server; one JSON line.

    python -m tests.gpu.encoder_budget [OVERRIDE ...]

An override takes the place of the one of the same key here. What there is by then is printed also where a point fails
or the time is up.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from orchestrator.records import RunRecord, read_record
from tests.gpu.sources import ROOT
from tests.starts import environment

OVERRIDES = (
    "experiment=encoder_budget",
    "device=cuda",
    "model=internvl2_5_8b",
    "model.load_format=dummy",
    "gpu.util=0.99",
    "startup_plan=off",
    "graphs.sizes=[256,64,16,4,1]",
    "stages.verify.num_requests=2",
    "stages.verify.max_tokens=4",
)
_LIMIT_S = 230.0
_TAIL = 1500


def overrides_with(given: list[str]) -> list[str]:
    by_key = {each.partition("=")[0]: each for each in (*OVERRIDES, *given)}
    return list(by_key.values())


def row(folder: Path, record: RunRecord) -> dict[str, Any]:
    """Of a point: what it was allowed to encode, what that took, and what was left for the KV cache."""
    stages = {stage.slot: stage for stage in record.stages}
    profile = stages["profile_run"].metrics if "profile_run" in stages else {}
    return {
        "point": int(folder.name),
        "status": record.status,
        "error": record.error.message if record.error is not None else None,
        "compute_budget": record.config["encoder"]["compute_budget"],
        "items": profile.get("encoder_items"),
        "set_by": profile.get("set_by"),
        "peaks_bytes": profile.get("peaks_bytes"),
        "ledger": record.ledger.model_dump() if record.ledger is not None else None,
        "num_gpu_blocks": record.kv_cache.num_gpu_blocks if record.kv_cache is not None else None,
        "num_tokens": record.kv_cache.num_tokens if record.kv_cache is not None else None,
        "verified": "tokens_sha256" in stages["verify"].metrics if "verify" in stages else None,
        "held_peak_bytes": record.ledger.peak_held_bytes if record.ledger is not None else None,
        "ready_s": record.ready_s,
        "total_s": record.total_s,
        "forked": record.import_server is not None,
    }


def command(arguments: list[str], limit_s: float) -> tuple[int, str]:
    """The exit code and the end of the output; 124 where it took too long."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            timeout=limit_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        return 124, str(late)
    return done.returncode, done.stdout[-_TAIL:]


def main(given: list[str]) -> int:
    overrides = overrides_with(given)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "sweep"
        server, said = command(["orchestrator.zygote", "start", "--idle-s=300"], 90.0)
        imported_s = time.monotonic() - begin
        how = ["orchestrator.zygote", "run"] if server == 0 else ["orchestrator"]
        code, output = command([*how, "-m", *overrides, f"hydra.sweep.dir={folder}"], _LIMIT_S - imported_s)
        command(["orchestrator.zygote", "stop"], 30.0)
        found = sorted((path.parent for path in folder.glob("*/run.json")), key=lambda path: int(path.name))
        records = [(path, read_record(path)) for path in found]
        rows = [row(path, record) for path, record in records]
        first = records[0][1] if records else None
    result = {
        "overrides": overrides,
        "exit_code": code,
        "server_s": round(imported_s, 3),
        "all_s": round(time.monotonic() - begin, 3),
        "device": first.device if first is not None else None,
        "versions": first.versions if first is not None else None,
        "rows": rows,
        "output": "" if code == 0 else f"{said if server else ''}{output}",
    }
    print(json.dumps(result))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
