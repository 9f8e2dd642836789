"""One point of a sweep: a start in a process of its own, whose end, whatever it is, is a record and a number."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.clock import Clock
from orchestrator.compose import Draft, read_all, validated
from orchestrator.compose.folders import ConfigFolders
from orchestrator.compose.home import Home
from orchestrator.compose.objective import objective, worst
from orchestrator.compose.process import Ended, ProcessDied, start
from orchestrator.compose.spelling import unescaped
from orchestrator.compose.tree import plain
from orchestrator.config import Config
from orchestrator.errors import ConfigError, Interrupted, OrchestratorError, StageError, UserError
from orchestrator.events import events_for
from orchestrator.planned import config_of_plan
from orchestrator.records import FILE_NAME, RunRecord, read_record, redact, write_record
from orchestrator.registry import Registry
from orchestrator.report.layout import one_line
from orchestrator.signals import owns_process
from orchestrator.skipping import make_room, set_aside, valid_run

if TYPE_CHECKING:
    from omegaconf import DictConfig

RESULT_NAME = "point.json"
OUTPUT_NAME = "output.log"


@dataclass(frozen=True)
class Result:
    """How a point ended, as the sweep's own process reads it, wherever the point ran.

    Attributes:
        sweep: the sweep that it is of; a folder can have those of several.
        exit_code: None until it has ended.
        objective: what a sweeper that searches gets; None for a point that failed.
        remark: why it failed, where the record in its folder does not say it.
    """

    sweep: str
    number: int
    overrides: tuple[str, ...]
    exit_code: int | None
    skipped: bool = False
    objective: float | None = None
    remark: str = ""


@dataclass(frozen=True)
class Job:
    """What Hydra's launchers call for each point, here or in a process of theirs on any machine: it can be pickled, and
    finds plugins and configuration anew where it runs.

    Attributes:
        home: the process of the sweep.
        swept: the settings that differ between points.
        by_server: have the import server fork the starts.
    """

    sweep: str
    home: Home
    swept: tuple[str, ...]
    config_dir: Path | None = None
    by_server: bool = False

    def __call__(self, tree: DictConfig) -> float:
        """The objective of the point; the worst there is if it failed.

        Raises:
            Interrupted: the sweep is to end.
            StageError: so is it, and this is a worker process of the launcher; or it has ended without this worker.
        """
        from hydra.core.hydra_config import HydraConfig

        if self.home.is_gone:
            raise StageError("the process of the sweep has ended")
        hydra = HydraConfig.get()
        point = _Point(
            self,
            tree,
            [unescaped(each) for each in hydra.overrides.task],
            Path(hydra.runtime.output_dir),
            Clock.from_now(),
        )
        self._write(point, hydra.job.num, None)
        try:
            code, skipped = point.run()
        except Interrupted as interrupt:
            self._write(point, hydra.job.num, interrupt.exit_code)
            if owns_process():
                raise
            raise StageError(f"point {point.folder.name} was interrupted by {interrupt}") from None
        found = objective(point.raw, self.swept, _record(point.folder)) if code == 0 else None
        self._write(point, hydra.job.num, code, skipped=skipped, objective=found, remark=point.remark)
        return worst(hydra.sweeper.get("direction")) if found is None else found

    def _write(self, point: _Point, number: Any, code: int | None, **more: Any) -> None:
        result = Result(self.sweep, int(number), tuple(point.overrides), code, **more)
        path = point.folder / RESULT_NAME
        temporary = path.with_name(f".{RESULT_NAME}.{os.getpid()}")
        temporary.write_text(redact(json.dumps(asdict(result))) + "\n")
        temporary.replace(path)


class _Point:
    def __init__(self, job: Job, tree: DictConfig, overrides: list[str], folder: Path, clock: Clock) -> None:
        self.job, self.tree, self.overrides, self.folder, self.clock = job, tree, overrides, folder, clock
        self.raw: dict[str, Any] = {}
        self.remark = ""

    def run(self) -> tuple[int, bool]:
        """The exit code, and whether nothing had to be done."""
        try:
            config = self._config()
            events = events_for(json_lines=config.log.json_lines)
            if config.run.skip_existing:
                if valid_run(self.folder, config) is not None:
                    events.info(f"point {self.folder.name}: skipped, its record is there")
                    return 0, True
                if remark := make_room(self.folder, config):
                    events.info(remark)
            elif (self.folder / FILE_NAME).exists():
                advice = "run.skip_existing=true goes on with that sweep, another hydra.sweep.dir begins one"
                raise ConfigError.of("hydra.sweep.dir", f"has the record of an earlier run; {advice}", self.folder)
            events.info(f"point {self.folder.name}: {' '.join(self.overrides)}")
            # Beside others, what it says is not readable among theirs.
            output = None if owns_process() else self.folder / OUTPUT_NAME
            code = self._ended(
                start(self._arguments(), by_server=self.job.by_server, home=self.job.home, output=output)
            )
            if output is not None:
                events.info(f"point {self.folder.name}: ended with exit code {code}; {output} has what it said")
            return code, False
        except Exception as error:
            return self._failed(error), False

    def _config(self) -> Config:
        registry = Registry.discover()
        self.raw, missing = plain(self.tree)
        # An unknown choice was composed as an empty file; what that leads to is no news.
        if unknown := ConfigFolders.find(registry, self.job.config_dir).problems_of(read_all(self.overrides)):
            raise ConfigError(unknown)
        config = validated(Draft(self.raw, missing), registry, self.overrides).config
        return config_of_plan(config) if config.device.kind == "plan" else config

    def _arguments(self) -> Sequence[str]:
        folders = [] if self.job.config_dir is None else [f"--config-dir={self.job.config_dir}"]
        return [*folders, *self.overrides, f"run.dir={self.folder}"]

    def _ended(self, ended: Ended) -> int:
        if not (self.folder / FILE_NAME).exists():
            if ended.code == UserError.exit_code and ended.errors:
                return self._failed(UserError("\n".join(ended.errors)), was_said=True)
            died = ProcessDied(f"the process of this start {ended.how} and left no record")
            return self._failed(died, ended.last_words)
        if ended.code < 0:
            self.remark = f"the record is whole, but the process {ended.how}"
            sys.stderr.write(f"error: point {self.folder.name}: {self.remark}\n")
        return ended.code if ended.code >= 0 else died_code(ended.code)

    def _failed(self, error: Exception, last_words: str | None = None, *, was_said: bool = False) -> int:
        """Leave a record of it."""
        from orchestrator.pipeline import error_record
        from orchestrator.rundir import run_id, started_at

        for line in [] if was_said else str(error).splitlines() or [type(error).__name__]:
            sys.stderr.write(f"error: point {self.folder.name}: {line}\n")
        if _skips(self.raw):
            set_aside(self.folder)
        if (self.folder / FILE_NAME).exists():
            self.remark = one_line(str(error))
        else:
            record = RunRecord(
                run_id=run_id(self.folder),
                started_at=started_at(self.clock),
                overrides=self.overrides,
                config=self.raw,
                error=error_record(error),
                total_s=self.clock.now(),
            )
            if record.error is not None and last_words:
                record.error.traceback = last_words
            write_record(record, self.folder)
        return error.exit_code if isinstance(error, OrchestratorError) else 1


def died_code(code: int) -> int:
    """A shell's number for the signal that ended a process."""
    return 128 - code


def _skips(raw: dict[str, Any]) -> bool:
    run = raw.get("run")
    return isinstance(run, dict) and run.get("skip_existing") is True


def _record(folder: Path) -> RunRecord | None:
    try:
        return read_record(folder)
    except (OSError, ValueError):
        return None
