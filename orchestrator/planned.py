"""What is different about a start that is only planned: what it needs to be told, and what its record says besides."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from orchestrator.config import Config, GpuSpec
from orchestrator.errors import ConfigError
from orchestrator.model_folder import GGUF, PICKLED
from orchestrator.records import RunRecord

LEFT_OUT = ("workspaces of convolutions", "temporary memory inside scans and reductions", "rounding of graphs")
"""What no plan counts: small beside the rest, and within its bound."""
_WEIGHTS = ("*.safetensors", GGUF, *PICKLED)
"""Of a model's folder, those that no start reads too: a plan of it is refused as the start would be."""


def config_of_plan(config: Config) -> Config:
    """The configuration that a plan runs. No weights are asked of a hub: shapes follow from the model's configuration.

    Raises:
        ConfigError: no card is named.
    """
    card_of(config)
    path = config.model.path
    files = path is not None and any(any(Path(path).expanduser().glob(pattern)) for pattern in _WEIGHTS)
    if files or (path is None and config.model.load_format == "auto"):
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"load_format": "dummy"})})


def plan_record(record: RunRecord, config: Config, assumed: Iterable[str] = ()) -> dict[str, Any]:
    """The node `plan` of a record: the ledger, predicted, and how far a start on that card may be from it.

    `bound_bytes` is of the KV cache, to both sides.

    Args:
        assumed: what could not be known and was taken at its worst.
    """
    spec = card_of(config)
    return {
        "card": spec.name,
        "measured": spec.measured,
        "allocator": spec.allocator,
        "ledger": None if record.ledger is None else record.ledger.model_dump(mode="json"),
        "kv_cache": None if record.kv_cache is None else record.kv_cache.model_dump(mode="json"),
        "bound_fraction": spec.bound_fraction,
        "bound_bytes": round(spec.bound_fraction * spec.total_bytes),
        "left_out": list(LEFT_OUT),
        "assumed": sorted(assumed),
    }


def card_of(config: Config) -> GpuSpec:
    """The card to plan for.

    Raises:
        ConfigError: none is named.
    """
    if config.gpu.spec is None:
        known = "gpu=h200, h100_80g, a100_80g, l4 and others name one"
        raise ConfigError.of("device.kind", f"there is no card to plan for; {known}", config.device.kind)
    return config.gpu.spec
