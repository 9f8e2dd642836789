"""Whether a start that is repeated on the same machine comes to the same: a start, and two times `orchestrator.rerun`
of it; one JSON line.

    python -m tests.gpu.rerun [OVERRIDE ...]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from orchestrator.records import read_record
from tests.gpu.sources import ROOT
from tests.starts import environment

_TAIL = 1500
_TIMES = 2


def command(*arguments: str, limit_s: float = 120.0) -> tuple[int, str, str]:
    """Exit code, output, and what it wrote to stderr; 124 where it took too long."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=ROOT, env=environment(), capture_output=True, text=True, check=False, timeout=limit_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        return 124, "", str(late)
    return done.returncode, done.stdout, done.stderr


def repeated(folder: Path) -> dict[str, Any]:
    code, output, errors = command("orchestrator.rerun", str(folder), "--dir", f"{folder}-{_number(folder)}", "--json")
    try:
        said = json.loads(output)
    except ValueError:
        return {"exit_code": code, "output": (output + errors)[-_TAIL:]}
    return {"exit_code": code, **{name: said[name] for name in ("before", "late", "results", "seconds", "is_same")}}


def _number(folder: Path) -> int:
    return len(list(folder.parent.glob(f"{folder.name}-*")))


def main(overrides: list[str]) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        code, output, errors = command("orchestrator", "device=cuda", *overrides, f"run.dir={folder}")
        if code != 0:
            print(json.dumps({"overrides": overrides, "exit_code": code, "output": (output + errors)[-_TAIL:]}))
            return code
        record = read_record(folder)
        times = [repeated(folder) for _ in range(_TIMES)]
    blocks = record.kv_cache.num_gpu_blocks if record.kv_cache is not None else None
    result = {"overrides": overrides, "device": record.device, "versions": record.versions, "num_gpu_blocks": blocks}
    print(json.dumps({**result, "times": times}))
    return 0 if all(each.get("is_same") for each in times) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
