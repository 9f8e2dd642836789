"""A checkpoint in its authors' layout, with the small files that transformers reads in its place, written once."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import transformers

from orchestrator.checkpoint import Checkpoint
from orchestrator.engine.originals.internvl_folder import VERSION, write_native
from orchestrator.model_folder import written
from orchestrator.originals.internvl_tensors import is_tied

_READ = frozenset({".json", ".model", ".txt"})
_MODELS = "models"


def natively(found: Checkpoint, cache_dir: Path) -> Checkpoint:
    """The checkpoint with a `native` folder below `cache_dir`; its weights stay where they are.

    Raises:
        CheckpointError: a tokenizer that cannot be read or is not what the model needs.
        ConfigError: the cache cannot be written.
    """
    tied = is_tied(found.tensors) if found.tensors else bool(found.config["llm_config"].get("tie_word_embeddings"))
    name = f"{found.folder.name}-native"
    target = cache_dir.expanduser().absolute() / _MODELS / f"{name}-{_identity(found.folder, tied)}"

    def write(folder: Path) -> None:
        write_native(found.folder, folder, found.config, tied=tied)

    return dataclasses.replace(found, native=written(name, write, target, cache_dir))


def _identity(folder: Path, tied: bool) -> str:
    """A fingerprint of all that the written files follow from."""
    digest = hashlib.sha256(f"{VERSION}:{transformers.__version__}:{tied}".encode())
    for path in sorted(folder.iterdir()):
        if path.suffix in _READ and not path.name.endswith(".index.json"):
            digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]
