"""The cards of the group `gpu`, and which of them plan alike."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.compose import compose, read_all
from orchestrator.compose.folders import ConfigFolders
from orchestrator.compose.spelling import Given
from orchestrator.config import Config, GpuSpec
from orchestrator.errors import ConfigError, near_miss
from orchestrator.registry import Registry


def known_cards(folders: ConfigFolders) -> tuple[str, ...]:
    """The options of the group that may describe a card."""
    return tuple(name for name in folders.options.get("gpu", ()) if name != "auto")


def without_card(overrides: Sequence[str]) -> tuple[list[str], str | None]:
    """The overrides that choose neither a device nor a card, and the card that was chosen.

    Raises:
        ConfigError: an override that cannot be read, or one with several values.
    """
    card, rest = None, []
    for text, given in zip(overrides, _read(overrides), strict=True):
        if given.key == "gpu" and given.prefix != "~":
            card = given.value
        elif given.key != "device" and not given.key.startswith("device."):
            rest.append(text)
    return rest, card


def _read(overrides: Sequence[str]) -> list[Given]:
    try:
        return read_all(overrides)
    except ConfigError:
        for given in read_all(overrides, multirun=True):
            if given.sweep:
                several = "is several values, and a plan is of one; `fit` compares them with --gpus and --utils"
                raise ConfigError.of(given.head, several, given.value) from None
        raise


def chosen_card(card: str | None, known: Sequence[str]) -> str:
    """
    Raises:
        ConfigError: none was chosen, or one that nobody knows.
    """
    if card is None:
        raise ConfigError.of("gpu", f"is required; give one of {', '.join(known)}")
    if card not in known:
        raise ConfigError.of("gpu", f"there is no card of that name; {near_miss(card, known)}", card)
    return card


def composed_for(card: str, overrides: Sequence[str], registry: Registry) -> Config:
    """The configuration of a plan for a card.

    Raises:
        ConfigError: it cannot work, or the option describes no card.
    """
    config = compose(for_card(card, overrides), registry=registry).config
    if config.gpu.spec is None:
        raise ConfigError.of("gpu.spec", f"gpu={card} describes no card to plan for; name another, such as gpu=h200")
    return config


def for_card(card: str, overrides: Sequence[str]) -> list[str]:
    """The overrides of a plan for a card."""
    return ["device=plan", f"gpu={card}", *overrides]


def alike(spec: GpuSpec) -> GpuSpec:
    """What decides the peaks and graphs of a plan; the rest of a card only adds to what is held."""
    constants = dict(name="", total_bytes=1, driver_bytes=0, context_bytes=0, library_bytes=0)
    major = spec.capability.partition(".")[0]
    return spec.model_copy(update={**constants, "capability": f"{major}.0", "measured": False, "bound_fraction": 0.0})
