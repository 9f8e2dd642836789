"""Quick starts for sweeps, named on a command line as `tests.points:Name`: stages that need no model."""

from __future__ import annotations

import os
import signal
import time

from orchestrator import Context, Stage, StageConfig, StageError
from orchestrator.config import Config
from tests.starts import BUILT_IN

ASLEEP = "asleep"


class Point(Stage[StageConfig]):
    """Ends well; but with `run.seed` 13 it fails, with 11 its process is killed, with 17 it sleeps."""

    def run(self, ctx: Context) -> str:
        ctx.metrics["pid"], ctx.metrics["parent"] = os.getpid(), os.getppid()
        match ctx.config.run.seed:
            case 13:
                raise StageError("the third wheel came off")
            case 11:
                os.kill(os.getpid(), signal.SIGSEGV)
            case 17:
                (ctx.run_dir / ASLEEP).touch()
                time.sleep(600)
        return "went well"


class FitsBelow(Stage[StageConfig]):
    """Works with a share of the device up to 0.7."""

    def run(self, ctx: Context) -> None:
        if ctx.config.gpu.util > 0.7:
            raise StageError("too much was asked for")


class NoEngine:
    """In the place of one that is never made."""

    @staticmethod
    def imports(config: Config) -> tuple[str, ...]:
        return ()


def only(stage: type[Stage[StageConfig]]) -> tuple[str, ...]:
    """The overrides of a start with that stage alone."""
    without = (f"~stage@stages.{slot}" for slot in BUILT_IN)
    return (
        "device=cpu",
        "engine.name=tests.points:NoEngine",
        *without,
        f"+stages.point.use=tests.points:{stage.__name__}",
    )
