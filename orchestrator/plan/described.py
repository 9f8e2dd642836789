"""What a model's own configuration says and no record holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.checkpoint import locate
from orchestrator.config import Config
from orchestrator.planned import config_of_plan
from orchestrator.registry import Registry


def positions(config: Config, registry: Registry) -> int | None:
    """Tokens of the longest sequence that the model was made for, whatever memory there is; None where it does not say.

    Raises:
        UserError: there is no such model.
    """
    return _number(config, registry, "max_position_embeddings")


def vocabulary(config: Config, registry: Registry) -> int | None:
    """Rows of the output layer; None where the model does not say.

    Raises:
        UserError: there is no such model.
    """
    return _number(config, registry, "vocab_size")


def element_type(config: Config, registry: Registry) -> str:
    """The type of the weights, also where `model.dtype` leaves it to the checkpoint.

    Raises:
        UserError: there is no such model.
    """
    return str(_read(config, registry).dtype_name)


def takes_media(config: Config, registry: Registry) -> bool:
    """Whether the model has an encoder besides its language model.

    Raises:
        UserError: there is no such model.
    """
    whole = _read(config, registry).config
    return whole.get_text_config() is not whole


def _number(config: Config, registry: Registry, name: str) -> int | None:
    value: Any = getattr(_read(config, registry).config.get_text_config(), name, None)
    return None if value is None else int(value)


def _read(config: Config, registry: Registry) -> Any:
    from orchestrator.engine.build import describe
    from orchestrator.engine.originals.native import natively

    model = config_of_plan(config).model
    cache_dir = Path(config.cache.dir).expanduser()
    found = locate(model, make=lambda name: registry.resolve("models", name)(), cache_dir=cache_dir)
    return describe(natively(found, cache_dir) if found.is_original else found, config)
