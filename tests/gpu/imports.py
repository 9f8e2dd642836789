"""Bare imports, plain starts and starts from the import server, in turn: one JSON line.

    python -m tests.gpu.imports [-n 3] OVERRIDES...

`bare_s` is a process that imports torch and a model's class, `no_gc_s` the same without garbage collections, and
`no_gc_libraries_beside_s` the same again while a thread loads torch's shared libraries. `has_bytecode` says whether
modules are compiled on disk: without that, each import compiles them anew. The first start from the server is reported
apart: what it imports itself, the server has for the next ones.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.gpu.sources import ROOT

BARE = "import torch\nfrom transformers import InternVLForConditionalGeneration\n"
NO_GC = f"import gc\ngc.disable()\n{BARE}"
BESIDE = f"""
import ctypes, importlib.util, os, threading
def load():
    libraries = os.path.join(os.path.dirname(importlib.util.find_spec("torch").origin), "lib")
    ctypes.CDLL(os.path.join(libraries, "libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(os.path.join(libraries, "libtorch_python.so"))
threading.Thread(target=load).start()
import transformers
{NO_GC}
"""
_LIMIT_S = 120


def process(command: Sequence[str], environment: Mapping[str, str]) -> tuple[float, int, str]:
    """Seconds, exit code, and the end of what it said."""
    begin = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    return round(time.monotonic() - begin, 3), done.returncode, (done.stdout + done.stderr)[-500:]


def start(command: Sequence[str], overrides: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """A start's seconds: of its process, and by what is in its record."""
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        seconds, code, said = process([sys.executable, *command, *overrides, f"run.dir={run}"], environment)
        record = json.loads((run / "run.json").read_text()) if (run / "run.json").is_file() else None
    if code != 0 or record is None:
        return {"process_s": seconds, "exit_code": code, "said": said}
    return {
        "process_s": seconds,
        "exit_code": code,
        "total_s": record["total_s"],
        "ready_s": record["ready_s"],
        "spans": {each["name"]: round(each["wall_s"], 3) for each in record["spans"]},
        "stages": {each["slot"]: round(each["wall_s"] or 0.0, 3) for each in record["stages"]},
        "imports": {
            part["package"]: round(part["s"], 3)
            for each in record["imports"]
            for part in each["parts"]
            if part["s"] > 0.05
        },
        "import_server": record["import_server"],
        "source": record["ledger"]["source"],
    }


def has_bytecode() -> dict[str, bool]:
    found = {name: find_spec(name) for name in ("torch", "transformers", "sympy", "orchestrator")}
    return {name: Path(spec.cached).is_file() for name, spec in found.items() if spec is not None and spec.cached}


def holders() -> list[int]:
    """Processes with a context, as the driver lists them."""
    ask = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) for line in done.stdout.split() if line.isdecimal()]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=3)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args(argv)
    overrides: list[str] = arguments.overrides
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    zygote = ["-m", "orchestrator.zygote"]
    result: dict[str, Any] = {
        "has_bytecode": has_bytecode(),
        "overrides": overrides,
        "bare_s": [],
        "no_gc_s": [],
        "no_gc_libraries_beside_s": [],
    }
    with tempfile.TemporaryDirectory() as runtime:
        environment["XDG_RUNTIME_DIR"] = runtime
        try:
            result["server_start_s"], code, said = process([sys.executable, *zygote, "start"], environment)
            if code != 0:
                result["server_said"] = said
            result["zygote_first"] = start([*zygote, "run"], overrides, environment)
            result["zygote"] = []
            for number in range(arguments.n):
                result["zygote"].append(start([*zygote, "run"], overrides, environment))
                bares = (("bare_s", BARE), ("no_gc_s", NO_GC), ("no_gc_libraries_beside_s", BESIDE))
                for name, program in bares[: 1 if number == 0 else 3]:
                    result[name].append(process([sys.executable, "-c", program], environment)[0])
            result["plain"] = start(["-m", "orchestrator"], overrides, environment)
            _, _, status = process([sys.executable, *zygote, "status", "--json"], environment)
            result["server"] = json.loads(status)
            result["server_has_a_context"] = result["server"]["pid"] in holders()
        finally:
            process([sys.executable, *zygote, "stop"], environment)
    print(json.dumps(result))
    every = [*result["zygote"], result["zygote_first"], result["plain"]]
    return 0 if all(each["exit_code"] == 0 for each in every) and not result["server_has_a_context"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
