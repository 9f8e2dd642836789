"""The command line as a call: overrides in, a started engine and its record out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

from orchestrator import app
from orchestrator.clock import Clock
from orchestrator.compose import compose
from orchestrator.engine.base import Engine
from orchestrator.errors import StageError
from orchestrator.events import Events, SilentEvents
from orchestrator.records import RunRecord
from orchestrator.registry import Registry


@dataclass
class Started:
    """A started engine and the record of its start. Close it, or use it in a `with`, to give everything back."""

    engine: Engine
    record: RunRecord
    cleanup: ExitStack

    def close(self) -> None:
        self.cleanup.close()

    def __enter__(self) -> Started:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class StartError(StageError):
    """A start that failed; `record` has the whole story."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        error = record.error
        super().__init__(f"{error.type}: {error.message}" if error else "the pipeline makes no engine")


def start(overrides: Sequence[str] = (), *, events: Events | None = None) -> Started:
    """Start an engine as `python -m orchestrator OVERRIDES` does; times in the record count from this call.

    Raises:
        UserError: the configuration cannot work.
        KeyboardInterrupt: the start was interrupted; its record is in its folder.
        StartError: a stage failed, or the pipeline has no stage that makes an engine.
    """
    clock = Clock.from_now()
    listener = events or SilentEvents()
    composed = compose(list(overrides))
    outcome = app.run(
        composed.config, overrides=list(overrides), events=listener, clock=clock, registry=Registry.discover()
    )
    if outcome.exit_code != 0 or outcome.engine is None:
        outcome.cleanup.close()
        if outcome.record.status == "interrupted":
            raise KeyboardInterrupt
        raise StartError(outcome.record)
    return Started(outcome.engine, outcome.record, outcome.cleanup)
