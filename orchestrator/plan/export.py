"""A planned start as the command line of another engine."""

from __future__ import annotations

import shlex
from typing import Any

from orchestrator.errors import ConfigError, UserError
from orchestrator.plan.described import element_type, takes_media, vocabulary
from orchestrator.plan.engines import ENGINES, Ask, Exported
from orchestrator.plan.planner import Planner
from orchestrator.stages.graph_capture import capture_sizes


def export(planner: Planner, card: str, engine: str) -> Exported:
    """The command that asks `engine` for what these overrides ask for on a card.

    Raises:
        UserError: the start does not fit the card, so that there is nothing to ask for.
    """
    config, planned = planner.config(card), planner.planned(card)
    fit = planned.footprint.at(planned.util)
    if not fit.fits:
        raise UserError(f"this does not fit on gpu={card}: {fit.refusal}; {fit.advice}")
    model = config.model.path
    if model is None:
        raise ConfigError.of(
            "model.name", "this model is made by this project; another engine cannot have it", config.model.name
        )
    sizes = config.graphs.sizes if isinstance(config.graphs.sizes, str) else list(config.graphs.sizes)
    captured = [] if config.graphs.mode == "none" else capture_sizes(sizes, config.scheduler.max_num_seqs)
    registry = planner.registry
    dtype, rows, media = element_type(config, registry), vocabulary(config, registry), takes_media(config, registry)
    return ENGINES[engine](Ask(config, planned.footprint, fit, model, dtype, tuple(captured), rows, media))


def as_text(exported: Exported) -> str:
    lines = [shlex.join(exported.command)]
    lines += [f"means   {line}" for line in exported.means]
    lines += [f"cannot  {line}" for line in exported.cannot]
    return "\n".join(lines)


def as_json(exported: Exported) -> dict[str, Any]:
    return vars(exported)
