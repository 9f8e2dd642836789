"""One modality's dummy item: what was found and made by an earlier start, or found and made now.

Two entries of the cache, because they depend on different things: what is costliest on the limits, and what the
processor makes of a shape on the shape. So a limit that leaves the costliest item as it was costs no processor call.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.cache import Entry, fingerprint
from orchestrator.engine.base import Engine, Media, Outlines
from orchestrator.environment import version_of
from orchestrator.errors import StageError
from orchestrator.modality.base import ItemSpec, MediaInputs, ModalityProfiler
from orchestrator.stage import Context

SCHEMA = 3
"""Of what is stored; a change of its meaning makes every older entry a miss."""

_LIBRARIES = ("orchestrator", "transformers", "torch", "torchvision", "pillow", "numpy")


class DummyItem:
    """Finds and makes the dummy item of one modality.

    Args:
        name: of the profiler, for people.
    """

    def __init__(self, ctx: Context, engine: Engine, profiler: ModalityProfiler, name: str, modality: str) -> None:
        self._ctx, self._engine, self._profiler = ctx, engine, profiler
        self._name, self._modality = name, modality

    def item(self) -> tuple[MediaInputs, int, dict[str, Any]]:
        """The item, the most tokens that one of its modality can have, and what the record says of it.

        Raises:
            StageError: the processor makes another number of tokens than the profiler counts.
        """
        with self._ctx.span(f"fetch {self._modality}"):
            search, _ = self._ctx.cache.fetch(self._search_key(), self._search)
            heaviest = self._spec(search.meta["heaviest"])
            outlined = self._outlined(heaviest)
            entry, how = outlined or self._ctx.cache.fetch(self._item_key(heaviest), lambda: self._make(heaviest))
        item = self._item_of(entry, heaviest)
        most_tokens = search.meta["costliest"]["tokens"] or item.num_embeds
        facts = {"tokens": most_tokens, "shape": search.meta["costliest"]["shape"], "bytes": item.num_bytes}
        if heaviest.shape != tuple(facts["shape"]):
            facts["made"] = {"tokens": item.num_embeds, "shape": list(heaviest.shape)}
        # Kept with the entry, because to read a large item again takes longer than to fetch it.
        content = {"sha256": entry.meta["sha256"]} if "sha256" in entry.meta else {}
        return item, most_tokens, facts | {"cache": how} | content

    def _search(self) -> Entry:
        with self._ctx.span(f"find {self._modality}"):
            found = {
                "costliest": self._profiler.costliest(self._modality),
                "heaviest": self._profiler.heaviest(self._modality),
            }
        said = {which: {"shape": list(spec.shape), "tokens": spec.tokens} for which, spec in found.items()}
        return Entry({}, {"about": self._about("costliest"), **said})

    def _make(self, spec: ItemSpec) -> Entry:
        with self._ctx.span(f"make {self._modality}"):
            self._ctx.metrics["processor_calls"] += 1
            item = self._engine.media_inputs(Media(self._modality, self._profiler.build(spec)))
        entry = self._entry_of(item, spec)
        return Entry(entry.tensors, entry.meta | {"sha256": sha256_of(entry.tensors)})

    def _outlined(self, spec: ItemSpec) -> tuple[Entry, str] | None:
        """Without pixels, where the engine only asks how large things are; nothing of it is kept."""
        if not isinstance(self._engine, Outlines):
            return None
        with self._ctx.span(f"outline {self._modality}"):
            item = self._engine.outlined(spec)
        return None if item is None else (self._entry_of(item, spec), "not needed")

    def _entry_of(self, item: MediaInputs, spec: ItemSpec) -> Entry:
        if spec.tokens is not None and item.num_embeds != spec.tokens:
            raise StageError(
                f"the profiler '{self._name}' counts {spec.tokens} tokens for {spec.modality} {spec.shape}, "
                f"and the model's processor makes {item.num_embeds} of it"
            )
        meta = {"token_ids": item.token_ids, "embed_mask": item.embed_mask, "content_hash": item.content_hash}
        about = self._about("item") | {"shape": list(spec.shape), "tokens": item.num_embeds}
        return Entry(_as_the_encoder_takes(item, self._engine.encoder_dtype), {"about": about, **meta})

    def _item_of(self, entry: Entry, spec: ItemSpec) -> MediaInputs:
        meta = entry.meta
        tensors = dict(entry.tensors)
        return MediaInputs(
            self._modality, meta["token_ids"], meta["embed_mask"], tensors, meta["content_hash"], spec.shape
        )

    def _spec(self, said: dict[str, Any]) -> ItemSpec:
        return ItemSpec(self._modality, tuple(said["shape"]), said["tokens"])

    def _search_key(self) -> str:
        """What decides which item is the costliest: the limits of this modality, and how long a sequence may be."""
        limits = self._ctx.config.mm.model_dump(exclude={"limit_per_prompt", "processor_kwargs"})
        return fingerprint(
            {
                "kind": "costliest",
                "limits": limits.get(self._modality, limits),
                "max_tokens": self._profiler.max_tokens,
                **self._common(),
            }
        )

    def _item_key(self, spec: ItemSpec) -> str:
        """What decides the encoder's arguments of an item."""
        dtype = self._engine.encoder_dtype
        return fingerprint({"kind": "item", "shape": spec.shape, "dtype": dtype, **self._common()})

    def _common(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "modality": self._modality,
            "profiler": [self._name, _code(type(self._profiler))],
            # Of the processor's files and of all its options, also those of other modalities.
            "processor": self._engine.processor_identity,
            "model_type": str(self._engine.model_config.model_type),
            "libraries": {name: _version(name) for name in _LIBRARIES},
        }

    def _about(self, what: str) -> dict[str, Any]:
        """For a person who looks at the cache."""
        model_type = str(self._engine.model_config.model_type)
        return {"kind": f"dummy {what}", "model_type": model_type, "modality": self._modality}


def _as_the_encoder_takes(item: MediaInputs, dtype: str) -> dict[str, Any]:
    """Rounded now as the encoder's call would round: half the bytes for a model in 16 bits."""
    import torch

    wanted = getattr(torch, dtype)
    return {name: each.to(wanted) if each.is_floating_point() else each for name, each in item.tensors.items()}


def sha256_of(tensors: Mapping[str, Any]) -> str:
    """Of names, element types, shapes and bytes of tensors on the CPU."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}:".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _code(profiler_class: type[ModalityProfiler]) -> list[str]:
    """Fingerprints of the files of a profiler and of what it derives from: a profiler that is edited finds anew."""
    files = set()
    for each in profiler_class.__mro__:
        try:
            files.add(inspect.getfile(each))
        except (TypeError, OSError):
            continue
    return sorted(_digest(Path(file)) for file in files)


def _digest(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return "unreadable"


def _version(name: str) -> str:
    """The version of a library; `missing` for one that is not there, which is no error."""
    from orchestrator import __version__

    return version_of(name) or (__version__ if name == "orchestrator" else "missing")
