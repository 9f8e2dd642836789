"""A process that starts engines on command: one JSON object a line in, one a line out. Driven by `tests.gpu.drive`.

It imports what a start imports before it says that it is ready, so that many starts cost one import each process.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

from orchestrator import Request, start
from orchestrator.errors import OrchestratorError
from orchestrator.events import SilentEvents
from orchestrator.records import RunRecord
from orchestrator.starting import Started, StartError

PROMPT = "Write about the sea, the wind and the people who live from both."


class Lines(SilentEvents):
    """Keeps what a start says."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def info(self, message: str) -> None:
        self.said.append(message)


class Worker:
    """The engines of this process, by the name that the caller gave them."""

    def __init__(self) -> None:
        self._engines: dict[str, Started] = {}
        self._load: Load | None = None

    def start(self, name: str, overrides: list[str]) -> dict[str, Any]:
        """Start an engine; what its record says, or why there is none."""
        lines = Lines()
        try:
            self._engines[name] = started = start(overrides, events=lines)
        except StartError as error:
            return {"error": str(error), **summary(error.record, lines.said)}
        except OrchestratorError as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return summary(started.record, lines.said)

    def close(self, name: str) -> dict[str, Any]:
        self._engines.pop(name).close()
        return {}

    def collect(self) -> dict[str, Any]:
        return {"collected": gc.collect()}

    def hide(self) -> dict[str, Any]:
        """From now on the driver's library lists no process here, as in a container that has its own process ids."""
        import pynvml

        pynvml.nvmlDeviceGetComputeRunningProcesses = lambda handle: []
        return {}

    def load(self, name: str, requests: int, max_tokens: int) -> dict[str, Any]:
        """Serve batch after batch in the background, until `unload`."""
        self._load = Load(self._engines[name], requests, max_tokens)
        return {}

    def unload(self) -> dict[str, Any]:
        load, self._load = self._load, None
        return load.stop() if load is not None else {}


class Load(threading.Thread):
    """Batches of requests, one after the other; the first is served even if `stop` comes at once."""

    def __init__(self, started: Started, requests: int, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._engine = started.engine
        self._requests = [
            Request(f"load-{number}", f"{number}. {PROMPT}", max_tokens=max_tokens, ignore_eos=True, chat=False)
            for number in range(requests)
        ]
        self._done = threading.Event()
        self._served, self._errors = 0, list[str]()
        self.start()

    def run(self) -> None:
        try:
            while True:
                outputs = self._engine.generate(self._requests)
                self._served += sum(output.error is None for output in outputs)
                self._errors += [output.error for output in outputs if output.error is not None]
                if self._done.is_set():
                    return
        # Whatever a library raises under load is what the caller wants to know.
        except Exception as error:
            self._errors.append(f"{type(error).__name__}: {error}")

    def stop(self) -> dict[str, Any]:
        self._done.set()
        self.join()
        return {"served": self._served, "errors": self._errors[:3]}


def summary(record: RunRecord, said: list[str]) -> dict[str, Any]:
    """Of a record, what the promises are judged by."""
    stages = {stage.slot: stage for stage in record.stages}
    capture = stages.get("graph_capture")
    memory = capture.memory if capture is not None else None
    grown = memory.after.ours_bytes - memory.before.ours_bytes if memory and memory.after and memory.before else None
    profile = stages.get("profile_run")
    return {
        "status": record.status,
        "total_s": round(record.total_s, 3),
        "ledger": record.ledger.model_dump() if record.ledger else None,
        "kv": record.kv_cache.model_dump() if record.kv_cache else None,
        "capture_grew_bytes": grown,
        "peak_activation_bytes": profile.metrics.get("peak_activation_bytes") if profile else None,
        "failed_stage": next((stage.slot for stage in record.stages if stage.status == "failed"), None),
        "said": [line for line in said if line.startswith(("wait", "other"))],
    }


def main(lines: TextIO, answer: Callable[[dict[str, Any]], None]) -> None:
    import torch  # noqa: F401  (imported now, not in the first start)
    import transformers  # noqa: F401

    worker = Worker()
    answer({"pid": os.getpid()})
    for line in lines:
        command = json.loads(line)
        answer(getattr(worker, command.pop("do"))(**command))


if __name__ == "__main__":
    main(sys.stdin, lambda result: print(json.dumps(result), flush=True))
