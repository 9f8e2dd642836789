"""Hydra's jobs as tasks of Ray: of a cluster of this machine's own, or of one that runs already."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from orchestrator.signals import SIGNALS, held_back, let_through

_LOOK_S = 0.2


class RayLauncher(Launcher):
    """Each job is a task with `hydra.launcher.ray.remote` as its options.

    Args:
        ray: `init`, the arguments of `ray.init`, and `remote`, those of `ray.remote`.
    """

    def __init__(self, ray: DictConfig) -> None:
        self._options = ray

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context, self._task, self._config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs; one whose worker died is a failed one among the others."""
        # Read when Ray is imported: points that say the same are not one point.
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
        import ray

        setup_globals()
        Path(str(self._config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        _connect(_plain(self._options.get("init")))
        task = ray.remote(**_plain(self._options.get("remote")))(_run)
        state = Singleton.get_state()
        jobs = [self._job(overrides, initial_job_idx + index) for index, overrides in enumerate(job_overrides)]
        running = [task.remote(self._context, job, self._task, state) for job in jobs]
        return [_result(each, job) for each, job in zip(running, jobs, strict=True)]

    def _job(self, overrides: Sequence[str], number: int) -> DictConfig:
        config = self._context.config_loader.load_sweep_config(self._config, list(overrides))
        with open_dict(config):
            config.hydra.job.id = f"{config.hydra.job.name}_{number}"
            config.hydra.job.num = number
        return config


def _run(context: HydraContext, config: DictConfig, task: TaskFunction, state: Any) -> JobReturn:
    """In Ray's worker."""
    setup_globals()
    Singleton.set_state(state)
    HydraConfig.instance().set_config(config)
    return run_job(
        hydra_context=context,
        task_function=task,
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )


def _result(running: Any, config: DictConfig) -> JobReturn:
    import ray

    try:
        # An exception in the middle of Ray's own waiting comes out of it as another one.
        with held_back():
            while not ray.wait([running], timeout=_LOOK_S)[0]:
                with let_through():
                    pass
        found: JobReturn = ray.get(running)
    except ray.exceptions.RayError as error:
        found = JobReturn(overrides=list(config.hydra.overrides.task), status=JobStatus.FAILED)
        found.return_value = error
    return found


def _connect(options: dict[str, Any]) -> None:
    """`ray.init`, once; a sweeper may launch many times."""
    import ray

    if ray.is_initialized():
        return
    if options.get("address") is None and "RAY_ADDRESS" not in os.environ:
        # A cluster for this sweep alone: nobody looks at it, and it tells nobody.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options.setdefault("include_dashboard", False)
    before = {each: signal.getsignal(each) for each in SIGNALS}
    ray.init(**options)
    # It takes SIGTERM for itself.
    for each, handler in before.items():
        signal.signal(each, handler)


def _plain(node: Any) -> dict[str, Any]:
    return {} if node is None else dict(OmegaConf.to_container(node, resolve=True))  # type: ignore[arg-type]
