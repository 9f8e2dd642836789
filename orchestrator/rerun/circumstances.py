"""What a run depended on besides its configuration, by dotted names: as recorded, and as far as it is known now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.config import Config
from orchestrator.device import nvml
from orchestrator.environment import host, versions
from orchestrator.model_files import model_files
from orchestrator.model_folder import folder_here
from orchestrator.provenance import provenance
from orchestrator.records import ProvenanceRecord, RunRecord
from orchestrator.registry import Registry

ABSENT = "-"
_ENVIRONMENT, _PLUGIN, _FILES, _CARD = "environment.", "plugin.", "model_files.", "device.name"


@dataclass(frozen=True)
class Difference:
    """`-` stands for what there was, or is, none of."""

    name: str
    then: str
    now: str


def recorded(record: RunRecord) -> dict[str, str]:
    """Of a run, by its record."""
    files: dict[str, dict[str, Any]] = next(
        (stage.metrics["model_files"] for stage in record.stages if "model_files" in stage.metrics), {}
    )
    device = {name: value for name, value in record.device.items() if name not in ("host", "uuid")}
    return {
        **_named("version", record.versions),
        **_named("device", device),
        **_named("host", record.device.get("host", {})),
        **_of_provenance(record.provenance),
        **_of_files(files),
    }


def present(config: Config, registry: Registry, then: Mapping[str, str]) -> dict[str, str]:
    """Of a start here and now, as far as that is known without importing torch or opening the device."""
    driver, cards = nvml.installed()
    found = {
        **_named("version", versions(driver)),
        **_named("host", host()),
        **_of_provenance(provenance(config, registry)),
    }
    if driver is None:
        # Without the driver's library nobody knows before the device is opened.
        del found["version.driver"]
    folder = folder_here(config.model)
    if folder is not None:
        found |= _of_files(model_files(folder))
    # Which of several cards it will be is known once it is opened.
    if then.get("device.kind") == "cuda" and cards and then.get(_CARD) not in cards:
        found[_CARD] = ", ".join(sorted(set(cards)))
    return found


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[Difference]:
    """What both know and is not the same. A variable, plugin or file that only one has is a difference too, where the
    other one says anything of such."""
    return [
        Difference(name, then.get(name, ABSENT), now.get(name, ABSENT))
        for name in dict.fromkeys([*then, *now])
        if then.get(name, ABSENT) != now.get(name, ABSENT)
        and (name in then or _lists(then, name))
        and (name in now or _lists(now, name))
    ]


def unknown(then: Mapping[str, str]) -> list[str]:
    """What an older record does not say."""
    said = {"sources and environment": "sources", "model files": _FILES}
    return [what for what, prefix in said.items() if not _any(then, prefix)]


def _lists(side: Mapping[str, str], name: str) -> bool:
    """Whether that side would name it, had it been there."""
    if name.startswith((_ENVIRONMENT, _PLUGIN)):
        return "sources" in side
    return name.startswith(_FILES) and _any(side, _FILES)


def _any(side: Mapping[str, str], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in side)


def _of_provenance(found: ProvenanceRecord | None) -> dict[str, str]:
    if found is None:
        return {}
    named = {**_named("plugin", found.plugins), **_named("environment", found.environment)}
    return {"sources": found.sources[:16], **named}


def _of_files(files: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {f"{_FILES}{name}": ", ".join(str(fact)[:16] for fact in facts.values()) for name, facts in files.items()}


def _named(prefix: str, values: Mapping[str, Any]) -> dict[str, str]:
    return {f"{prefix}.{name}": ABSENT if value is None else str(value) for name, value in values.items()}
