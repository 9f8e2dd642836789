"""Predict the points on an H200, without one, before they are measured.

python -m tests.gpu.predict [--out FOLDER] [MODEL ...]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from orchestrator.planning import plan
from tests.gpu.points import MODELS, PREDICTIONS, TEXT_MODELS, facts, points_of, write


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.predict", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="names; by default those that the goals name")
    parser.add_argument("--out", type=Path, default=PREDICTIONS)
    arguments = parser.parse_args()
    if unknown := set(arguments.models) - {*MODELS, *TEXT_MODELS}:
        parser.error(f"no points of {', '.join(sorted(unknown))}; there are {', '.join((*MODELS, *TEXT_MODELS))}")
    failed = False
    for model in arguments.models or MODELS:
        found = {}
        for point in points_of(model):
            start = time.perf_counter()
            found[point.name] = result = facts(plan(["device=plan", "gpu=h200", *point.overrides]))
            print(f"{model:<20} {point.name:>3}  {result['status']}  {time.perf_counter() - start:5.1f} s", flush=True)
            failed |= result["status"] != "ok"
        write(arguments.out, model, found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
