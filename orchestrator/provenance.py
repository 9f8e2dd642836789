"""What a run depends on besides its configuration: the code that runs, plugins, environment variables, model files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from orchestrator.config import Config
from orchestrator.environment import variables
from orchestrator.records import ProvenanceRecord, redact
from orchestrator.registry import Registry
from orchestrator.sources import identity_of, sources_hash


def provenance(config: Config, registry: Registry) -> ProvenanceRecord:
    """Of a start with this configuration, here and now. Imports no plugin that the pipeline does not name."""
    return ProvenanceRecord(
        sources=sources_hash(),
        plugins=dict(sorted([*_installed(registry), *_by_reference(config, registry)])),
        environment={name: redact(value) for name, value in variables().items()},
    )


def _installed(registry: Registry) -> Iterable[tuple[str, str]]:
    """Distributions that bring plugins, with their versions. Those of the checkout are in its sources' hash."""
    for plugin in registry.plugins():
        name, _, version = plugin.origin.partition(" ")
        if version:
            yield name, version


def _by_reference(config: Config, registry: Registry) -> Iterable[tuple[str, str]]:
    """Stages that are given as `module:Class`, with a hash of their code."""
    for options in config.stages.values():
        use = str(options.get("use"))
        if not registry.has("stages", use):
            yield use, _hash(identity_of(registry.resolve("stages", use)))


def _hash(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
