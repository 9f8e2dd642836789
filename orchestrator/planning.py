"""A plan as a call: what a start on a card would take, without the card."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from orchestrator import app
from orchestrator.clock import Clock
from orchestrator.compose import compose
from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.events import Events, SilentEvents
from orchestrator.records import RunRecord
from orchestrator.registry import Registry


def plan(
    wanted: Sequence[str] | Config, *, registry: Registry | None = None, events: Events | None = None
) -> RunRecord:
    """The record of a planned start, also of one that does not fit: `error` says why. Nothing is left on disk but what
    the cache keeps, and no GPU is touched. May be called any number of times.

    Args:
        wanted: overrides as on the command line, among them a card (`gpu=h200`); `device=plan` may be left out. Or a
            configuration whose `device.kind` is `plan`.

    Raises:
        UserError: the configuration cannot work, whatever the card has.
    """
    found = registry or Registry.discover()
    overrides: list[str] = []
    if isinstance(wanted, Config):
        config = wanted
    else:
        overrides = list(wanted) if "device=plan" in wanted else ["device=plan", *wanted]
        config = compose(overrides, registry=found).config
    if config.device.kind != "plan":
        raise ConfigError.of("device.kind", "only device=plan starts nothing", config.device.kind)
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        outcome = app.run(
            config,
            overrides=overrides,
            events=events or SilentEvents(),
            clock=Clock.from_now(),
            registry=found,
            run_dir=Path(folder),
        )
        outcome.cleanup.close()
    return outcome.record
