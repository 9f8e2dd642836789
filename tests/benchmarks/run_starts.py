"""Whole starts that profile, each in a new process, and beside each round a bare import of the same modules.

    python tests/benchmarks/run_starts.py [-n 5] [--json FILE] [-- OVERRIDES...]

`python -m orchestrator.bench --modes profiled`, from any folder and without installing anything.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str]) -> int:
    """The exit code of the benchmark."""
    from orchestrator.bench.__main__ import main as bench

    parser = argparse.ArgumentParser(description="Repeat whole starts in new processes.")
    parser.add_argument("-n", default="5", metavar="STARTS", help="how many are measured (default: 5)")
    parser.add_argument("--json", metavar="FILE", help="write everything there")
    parser.add_argument("overrides", nargs="*", help="as on the command line of orchestrator, after --")
    arguments = parser.parse_args(argv)
    out = ["--records", "--out", arguments.json] if arguments.json is not None else []
    return bench(["-n", arguments.n, "--modes", "profiled", *out, "--", *arguments.overrides])


if __name__ == "__main__":
    # For this process and for those that it starts.
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    sys.exit(main(sys.argv[1:]))
