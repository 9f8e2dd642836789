"""Sweeps: Hydra's sweeper and launcher run the points; a point that cannot work is a failed record, not the end."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from orchestrator.compose import Draft, draft_of, examine, read_all, required
from orchestrator.compose.experiment import with_parameters
from orchestrator.compose.folders import ConfigFolders
from orchestrator.compose.home import Home
from orchestrator.compose.hydra_main import run_hydra
from orchestrator.compose.launchers import offer_ray
from orchestrator.compose.objective import is_maximised, problem_with
from orchestrator.compose.point import Job
from orchestrator.compose.process import told_to_workers
from orchestrator.compose.spelling import Given, is_interval, quoted
from orchestrator.compose.sweep_end import exit_code, finished_points, shown
from orchestrator.compose.tree import compose_tree, translated
from orchestrator.compose.trials import make_ready
from orchestrator.errors import ConfigError, OrchestratorError, Problem, StageError, UserError
from orchestrator.events import events_for
from orchestrator.records import redact
from orchestrator.registry import Registry

_MOST_SAMPLES = 8
_MOST_OF_AN_ERROR = 400


@dataclass(frozen=True)
class _Plan:
    """What is settled before the first point: where the records go, and who chooses the points."""

    folder: Path
    json_lines: bool
    searches: bool
    direction: Any
    storage: Any

    @property
    def maximised(self) -> bool | None:
        return is_maximised(self.direction) if self.searches else None


def sweep(overrides: Sequence[str], config_dir: Path | None, *, by_server: bool = False) -> int:
    """Run a sweep, each start in a process of its own; the exit code.

    Raises:
        ConfigError: what no point can work with.
        UserError, StageError: what the sweeper or the launcher could not do, before the first point or later.
        Interrupted: once every start under way has left its record.
    """
    registry = Registry.discover()
    offer_ray()
    folders = ConfigFolders.find(registry, config_dir)
    prepared = prepare(with_parameters(overrides, folders), registry, folders)
    given = read_all(prepared, multirun=True)
    plan = _plan(draft_of(_sample(given, 0, folders), folders).used, folders)
    make_ready(plan.storage)
    # Said here, because every process that runs a point has to mean the same folder.
    prepared.append(f"hydra.sweep.dir={quoted(str(plan.folder))}")
    swept = tuple(each.head for each in given if each.sweep)
    job = Job(
        secrets.token_hex(8), Home.here(), swept, None if config_dir is None else config_dir.absolute(), by_server
    )
    failed = 1
    try:
        with told_to_workers():
            failed = run_hydra(["--multirun"], prepared, folders, job)
    except OrchestratorError:
        raise
    except Exception as error:
        raise _broken(error, begun=bool(finished_points(plan.folder, job.sweep))) from error
    finally:
        _redact(plan.folder / "multirun.yaml")
        points = finished_points(plan.folder, job.sweep)
        events_for(json_lines=plan.json_lines).info(shown(points, plan.folder, swept=swept, maximised=plan.maximised))
    return max(failed, exit_code(points, searches=plan.searches))


def _broken(error: Exception, *, begun: bool) -> OrchestratorError:
    what = redact(shorten(str(error), _MOST_OF_AN_ERROR, placeholder=" ..."))
    told = f"the sweep {'broke off' if begun else 'cannot run'}: {type(error).__name__}: {what}"
    return StageError(told) if begun else UserError(told)


def _redact(path: Path) -> None:
    """Hydra's sweeper leaves the overrides there as they were typed."""
    with suppress(OSError):
        path.write_text(redact(path.read_text()))


def _plan(given: Sequence[Given], folders: ConfigFolders) -> _Plan:
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        tree = compose_tree(given, folders, with_hydra=True)
        sweeper = tree.hydra.sweeper
        if problem := problem_with(sweeper.get("direction")):
            raise ConfigError([problem])
        target = str(sweeper.get("_target_", ""))
        return _Plan(
            folder=Path(str(tree.hydra.sweep.dir)).expanduser().absolute(),
            json_lines=OmegaConf.select(tree, "log.json") is True,
            searches=not target.endswith(".BasicSweeper"),
            direction=sweeper.get("direction"),
            storage=sweeper.get("storage") if target.endswith(".OptunaSweeper") else None,
        )
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([translated(error)]) from None


def prepare(overrides: Sequence[str], registry: Registry, folders: ConfigFolders) -> list[str]:
    """The overrides of a sweep as Hydra takes them, once nothing is wrong with what all points share.

    Raises:
        ConfigError: what no point can work with. A problem of single points is left to them.
    """
    given = read_all(overrides, multirun=True)
    _refuse_a_folder_for_all(given)
    _refuse_intervals(given)
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


def _refuse_a_folder_for_all(given: Sequence[Given]) -> None:
    for each in given:
        if each.head == "run.dir":
            raise ConfigError.of(each.head, "the records of a sweep go to hydra.sweep.dir; give that", each.value)


def _refuse_intervals(given: Sequence[Given]) -> None:
    if any(each.key == "hydra/sweeper" for each in given):
        return
    drawn = [each for each in given if is_interval(each)]
    advice = "an interval needs a sweeper that draws from it: hydra/sweeper=optuna; or list the values"
    if drawn:
        raise ConfigError(Problem(each.head, advice, each.value) for each in drawn)


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
