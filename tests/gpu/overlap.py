"""What each overlap gains, on a real-size checkpoint: warm with everything and without each; cold with and without the
files read ahead. Prints one line of JSON.

    python -m tests.gpu.overlap FOLDER

FOLDER is on a disk, and has the model that `python -m tests.gpu.write_checkpoint internvl2_5_8b FOLDER` writes; if it
is not there, it is written first.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from orchestrator.tensorfile import find_weight_files
from tests.benchmarks.overlap import measure, summary
from tests.gpu.sources import ROOT

WARM = ("all", "without open device", "without processor", "none")
COLD = ("all", "without read ahead")


def main() -> int:
    folder = Path(sys.argv[1])
    if not (folder / "config.json").is_file():
        command = [sys.executable, "-m", "tests.gpu.write_checkpoint", "internvl2_5_8b", str(folder)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    overrides = ["device=cuda", "model=auto", f"model.path={folder}", "gpu.util=0.9", "startup_plan=off"]
    overrides += ["scheduler.max_model_len=32768", "pipeline=profile_only", "~stage@stages.profile_run"]
    found: dict[str, Any] = {}
    for name, count, variants, files in (("cold", 1, COLD, find_weight_files(folder)), ("warm", 2, WARM, ())):
        try:
            found[name] = summary(measure(count, variants, overrides, files))
        except Exception as error:
            found[name] = {"error": str(error)}
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
