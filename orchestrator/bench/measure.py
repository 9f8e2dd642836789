"""Rounds of starts: in each, one of every mode, a bare import and, if there is one, the other engine."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator.bench.against import Other, start_other
from orchestrator.bench.modes import COLD, Mode
from orchestrator.bench.page_cache import drop
from orchestrator.bench.processes import FailedProcess, Place, timed
from orchestrator.compose import compose
from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.model_folder import find_folder
from orchestrator.registry import Registry
from orchestrator.tensorfile import find_weight_files

_BARE = """
import sys, torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
try:
    config = AutoConfig.from_pretrained(sys.argv[1])
except (OSError, ValueError):  # a layout that transformers does not know: its own class of the same model
    getattr(transformers, "InternVLForConditionalGeneration")
else:
    for auto in (AutoModelForImageTextToText, AutoModelForCausalLM):
        if type(config) in auto._model_mapping:
            auto._model_mapping[type(config)]
            break
"""
_MOST_LEFT = 0.01


@dataclass(frozen=True)
class Job:
    """What is to be measured."""

    overrides: Sequence[str]
    modes: Sequence[Mode]
    count: int
    other: Other | None
    timeout_s: float


@dataclass(frozen=True)
class Start:
    """One start: seconds from spawning its process to its exit, and its record."""

    process_s: float
    record: Mapping[str, Any]


@dataclass
class Measured:
    """What was measured, in the order in which it was; `bare_s` and `marks` have a value a round."""

    starts: dict[str, list[Start]] = field(default_factory=dict)
    bare_s: list[float] = field(default_factory=list)
    marks: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def note(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)


def measure(job: Job, say: Callable[[str], None], into: Measured | None = None) -> Measured:
    """Run everything.

    Args:
        say: told what runs next.
        into: gets each result at once, for a caller who wants what there is if something fails.

    Raises:
        UserError: the overrides cannot work, or a mode cannot be had with them.
        FailedProcess: something that was started failed.
    """
    config = compose(list(job.overrides)).config
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch, ExitStack() as stack:
        runs = _Runs(job, config, Path(scratch), into or Measured())
        if sys.dont_write_bytecode:
            runs.measured.note("bytecode is not written here: modules that have none are compiled in every process")
        if any(mode.is_forked for mode in job.modes):
            say("import server")
            stack.enter_context(runs.import_server())
        if not all(mode.is_first for mode in job.modes):
            say("a start that fills the caches")
            runs.fill_caches()
        for number in range(1, job.count + 1):
            for mode in job.modes:
                say(f"round {number}: {mode.name}")
                runs.start(mode)
            say(f"round {number}: bare import")
            runs.bare_import()
            if job.other is not None:
                say(f"round {number}: {job.other.command}")
                runs.other_start(job.other)
        return runs.measured


class _Runs:
    def __init__(self, job: Job, config: Config, scratch: Path, measured: Measured) -> None:
        measured.starts |= {mode.name: [] for mode in job.modes}
        self.measured = measured
        self._job, self._config, self._scratch = job, config, scratch
        # An import server of this benchmark's own.
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(scratch)}
        self._place = Place(environment, Path.cwd(), job.timeout_s)
        self._log = scratch / "log"
        self._count = 0
        self._weights = _weight_files(config) if any(mode.is_cold for mode in job.modes) else []

    @contextmanager
    def import_server(self) -> Iterator[None]:
        command = [sys.executable, "-m", "orchestrator.zygote"]
        # Its socket's folder is for this user alone.
        self._scratch.chmod(0o700)
        timed([*command, "start"], self._place, self._log)
        try:
            yield
        finally:
            timed([*command, "stop"], self._place, self._log)

    def fill_caches(self) -> None:
        given = list(self._job.overrides)
        if not any(each.startswith("startup_plan=") for each in given):
            given.append("startup_plan=refresh")
        self._start(Mode("profiled", is_cold=False).command(given, self._new_folder() / "run"), self._place)

    def start(self, mode: Mode) -> None:
        folder = self._new_folder()
        if mode.is_cold and (left := drop(self._weights)) > _MOST_LEFT:
            self.measured.note(f"{mode.name}: {left:.0%} of the weights' files stayed in the page cache")
        environment = {**self._place.environment, **mode.environment(folder)}
        start = self._start(
            mode.command(self._job.overrides, folder / "run"), replace(self._place, environment=environment)
        )
        self.measured.starts[mode.name].append(start)
        status = plan_status(start.record)
        if mode.kind in ("second", "zygote") and status != "hit":
            self.measured.note(f"{mode.name}: the start-up plan was not taken over ({status or 'no stage says so'})")

    def bare_import(self) -> None:
        folder = find_folder(self._config.model, make=_maker, cache_dir=Path(self._config.cache.dir).expanduser())
        self.measured.bare_s.append(timed([sys.executable, "-c", _BARE, str(folder)], self._place, self._log))

    def other_start(self, other: Other) -> None:
        for name, seconds in start_other(other, self._place, self._log).items():
            self.measured.marks.setdefault(name, []).append(seconds)

    def _start(self, command: Sequence[str], place: Place) -> Start:
        folder = Path(command[-1].partition("=")[2])
        seconds = timed(command, place, self._log)
        return Start(seconds, json.loads((folder / "run.json").read_text()))

    def _new_folder(self) -> Path:
        self._count += 1
        folder = self._scratch / str(self._count)
        folder.mkdir()
        return folder


def plan_status(record: Mapping[str, Any]) -> str | None:
    """What became of the start-up plan, as the last stage that knows says."""
    said = [stage["metrics"]["startup_plan"] for stage in record["stages"] if "startup_plan" in stage["metrics"]]
    return str(said[-1]["status"]) if said else None


def _weight_files(config: Config) -> list[Path]:
    """
    Raises:
        ConfigError: there are none before the start itself makes them.
    """
    model = config.model
    files: Sequence[Path] = ()
    if model.load_format == "auto" and model.path is not None:
        files = find_weight_files(find_folder(model, make=_maker, cache_dir=Path(config.cache.dir).expanduser()))
    if not files:
        raise ConfigError.of("--modes", "cold starts need weights in files: give model.path=FOLDER", f"...{COLD}")
    return list(files)


def _maker(name: str) -> Any:
    return Registry.discover().resolve("models", name)()


__all__ = ["FailedProcess", "Job", "Measured", "Start", "measure", "plan_status"]
