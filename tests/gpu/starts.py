"""Process start to verified: first, second and forked starts, and a bare import, in turn. Prints one line of JSON.

    python -m tests.gpu.starts ROUNDS MODE,... [OVERRIDES...]

What there is by then is printed also where a start fails.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from orchestrator.bench.measure import Job, Measured, measure
from orchestrator.bench.modes import Mode
from orchestrator.bench.results import as_json, columns
from orchestrator.errors import OrchestratorError


def main() -> int:
    rounds, modes, *overrides = sys.argv[1:]
    job = Job(overrides, [Mode.of(name) for name in modes.split(",")], int(rounds), None, 200.0)
    measured, found = Measured(), dict[str, Any]()
    try:
        measure(job, lambda line: print(line, flush=True), measured)
        found = as_json(job, measured, records=False)
    except OrchestratorError as error:
        found = {"error": str(error), "seconds": columns(measured), "notes": measured.notes}
    print(json.dumps(found), flush=True)
    return 1 if "error" in found else 0


if __name__ == "__main__":
    sys.exit(main())
