"""Sweeps: Hydra's sweeper and launcher run the points; a point that cannot work is a failed record, not the end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.clock import Clock
from orchestrator.compose import Draft, draft_of, examine, read_all, required, validated
from orchestrator.compose.folders import ConfigFolders
from orchestrator.compose.spelling import Given
from orchestrator.compose.tree import plain
from orchestrator.config import Config
from orchestrator.errors import ConfigError, Interrupted, OrchestratorError, Problem
from orchestrator.events import Events, JsonEvents, TextEvents
from orchestrator.records import FILE_NAME, RunRecord, write_record
from orchestrator.registry import Registry

if TYPE_CHECKING:
    from omegaconf import DictConfig

_MOST_SAMPLES = 8


def prepare(overrides: Sequence[str], registry: Registry, folders: ConfigFolders) -> list[str]:
    """The overrides of a sweep as Hydra takes them, once nothing is wrong with what all points share.

    Raises:
        ConfigError: what no point can work with. A problem of single points is left to them.
    """
    given = read_all(overrides, multirun=True)
    swept = {each.head for each in given if each.sweep}
    samples = [_sample(given, index, folders) for index in range(_sample_count(given))]
    drafts = [draft_of(sample, folders) for sample in samples]
    names = _shared([draft.problems for draft in drafts])
    values = [each for each in _shared([_of_values(draft, registry) for draft in drafts]) if not _is_swept(each, swept)]
    if names or values:
        raise ConfigError([*names, *values])
    _let_compose([each for each in given if each.sweep and each.key in folders.options], folders)
    added = {each.head for draft in drafts for each in draft.used if each.prefix == "++"}
    return [(each.adding() if each.head in added and not each.prefix else each).spelled for each in given]


def _sample_count(given: Sequence[Given]) -> int:
    return min(_MOST_SAMPLES, max((len(each.sweep) for each in given), default=1) or 1)


def _sample(given: Sequence[Given], index: int, folders: ConfigFolders) -> list[Given]:
    """The overrides of one point, without choices that do not exist."""
    sample: list[Given] = []
    for each in given:
        values = each.sweep
        if values and each.key in folders.options:
            values = tuple(value for value in values if folders.unknown(each, value) is None)
        if values:
            sample.append(each.chosen(values[index % len(values)]))
        elif not each.sweep:
            sample.append(each)
    return sample


def _of_values(draft: Draft, registry: Registry) -> list[Problem]:
    _, problems = examine(draft, registry)
    return [problem for problem in problems if problem not in draft.problems] + required(draft)


def _shared(found: Sequence[list[Problem]]) -> list[Problem]:
    others = [{(each.field, each.message) for each in problems} for problems in found[1:]]
    return [each for each in found[0] if all((each.field, each.message) in other for other in others)]


def _is_swept(problem: Problem, swept: set[str]) -> bool:
    return any(f"{problem.field}.".startswith(f"{head}.") for head in swept)


def _let_compose(choices: Sequence[Given], folders: ConfigFolders) -> None:
    """Give Hydra an empty file for each swept choice that does not exist. Its sweeper composes all points before the
    first one runs and would end the whole sweep; so the point composes, and its job reports the unknown name."""
    from hydra.core.config_store import ConfigStore

    for each in choices:
        for name in each.sweep:
            if folders.unknown(each, name) is not None:
                ConfigStore.instance().store(group=each.key, name=name.strip("'\""), node={}, provider="orchestrator")


@dataclass
class Job:
    """Runs the points that Hydra gives it; `codes` are their exit codes, as far as they ran in this process."""

    registry: Registry
    folders: ConfigFolders
    codes: list[int] = field(default_factory=list)

    def __call__(self, tree: DictConfig) -> int:
        from hydra.core.hydra_config import HydraConfig

        hydra = HydraConfig.get()
        code = self._run(tree, list(hydra.overrides.task), Path(hydra.runtime.output_dir))
        self.codes.append(code)
        return code

    def _run(self, tree: DictConfig, overrides: list[str], folder: Path) -> int:
        from orchestrator import app

        clock = Clock.from_now()
        raw: dict[str, Any] = {}
        try:
            raw, missing = plain(tree)
            # An unknown choice was composed as an empty file; what that leads to is no news.
            if unknown := self.folders.problems_of(read_all(overrides)):
                raise ConfigError(unknown)
            draft = Draft(raw, missing)
            config = validated(draft, self.registry, overrides).config
            events = events_for(config)
            events.info(f"point {folder.name}: {' '.join(overrides)}")
            outcome = app.run(
                config, overrides=overrides, events=events, clock=clock, registry=self.registry, run_dir=folder
            )
            outcome.cleanup.close()
        except Exception as error:
            return _record_failure(error, raw, overrides, folder, clock)
        if outcome.record.status == "interrupted":
            raise Interrupted(outcome.exit_code - 128)
        return outcome.exit_code


def _record_failure(error: Exception, raw: dict[str, Any], overrides: list[str], folder: Path, clock: Clock) -> int:
    from orchestrator.pipeline import error_record
    from orchestrator.rundir import run_id, started_at

    for line in str(error).splitlines() or [type(error).__name__]:
        sys.stderr.write(f"error: point {folder.name}: {line}\n")
    if not (folder / FILE_NAME).exists():
        record = RunRecord(run_id=run_id(folder), started_at=started_at(clock), overrides=overrides, config=raw)
        record.error, record.total_s = error_record(error), clock.now()
        write_record(record, folder)
    return error.exit_code if isinstance(error, OrchestratorError) else 1


def events_for(config: Config) -> Events:
    return JsonEvents() if config.log.json_lines else TextEvents()
