"""Which tensor of an `internvl_chat` checkpoint goes where in transformers' InternVL.

No tensor changes its values. Most change their name; the packed projections are cut into rows, each of which is one run
of bytes in the file and one run of rows in the model, so that they can be read to their place without a copy between.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from orchestrator.errors import CheckpointError
from orchestrator.originals.internvl_chat import has_packed_names, heads
from orchestrator.tensorfile import Place, TensorEntry

_VISION = "model.vision_tower"
_TEXT = "model.language_model"
_PROJECTOR = "model.multi_modal_projector"

_OUTSIDE_LAYERS = {
    "vision_model.embeddings.class_embedding": f"{_VISION}.embeddings.cls_token",
    "vision_model.embeddings.position_embedding": f"{_VISION}.embeddings.position_embeddings",
    "vision_model.embeddings.patch_embedding": f"{_VISION}.embeddings.patch_embeddings.projection",
    "mlp1.0": f"{_PROJECTOR}.layer_norm",
    "mlp1.1": f"{_PROJECTOR}.linear_1",
    "mlp1.3": f"{_PROJECTOR}.linear_2",
    "language_model.model.tok_embeddings": f"{_TEXT}.embed_tokens",
    "language_model.model.embed_tokens": f"{_TEXT}.embed_tokens",
    "language_model.model.norm": f"{_TEXT}.norm",
    "language_model.output": "lm_head",
    "language_model.lm_head": "lm_head",
}
_IN_VISION_LAYERS = {
    "attn.proj": "attention.projection_layer",
    "attn.q_norm": "attention.q_norm",
    "attn.k_norm": "attention.k_norm",
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
    "ls1": "lambda_1",
    "ls2": "lambda_2",
}
_IN_PACKED_LAYERS = {
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_VISION_LAYER = re.compile(r"vision_model\.encoder\.layers\.(\d+)\.(.+?)((?:\.weight|\.bias)?)")
_TEXT_LAYER = re.compile(r"language_model\.model\.layers\.(\d+)\.(.+?)(\.weight|\.bias)")
_HEAD = re.compile(r"language_model\.(?:output|lm_head)\.weight")


def place(tensors: Iterable[TensorEntry], config: Mapping[str, Any]) -> tuple[TensorEntry, ...]:
    """The same bytes in the same order, each entry with its place; one of an unknown name has none.

    Args:
        config: config.json of the checkpoint, as `refuse_unknown` accepts it.

    Raises:
        CheckpointError: a packed tensor has another number of rows than the configuration's heads make.
    """
    packed = has_packed_names(config)
    query, key_value = heads(config)
    return tuple(part for entry in tensors for part in _parts(entry, packed, query, key_value))


def is_tied(tensors: Iterable[TensorEntry]) -> bool:
    """Whether the output head is the embedding: it has no tensor of its own."""
    return not any(_HEAD.fullmatch(entry.name) for entry in tensors)


def _parts(entry: TensorEntry, packed: bool, query: int, key_value: int) -> Iterator[TensorEntry]:
    if match := _VISION_LAYER.fullmatch(entry.name):
        layer, name, kind = match.groups()
        within = f"{_VISION}.encoder.layer.{layer}"
        if name == "attn.qkv":
            yield from _three(entry, f"{within}.attention", kind, 1, [1, 1, 1])
        else:
            yield _renamed(entry, within, _IN_VISION_LAYERS.get(name), kind)
    elif match := _TEXT_LAYER.fullmatch(entry.name):
        layer, name, kind = match.groups()
        within = f"{_TEXT}.layers.{layer}"
        if packed and name == "attention.wqkv":
            yield from _three(entry, f"{within}.self_attn", kind, key_value, [query // key_value, 1, 1])
        else:
            yield _renamed(entry, within, _IN_PACKED_LAYERS.get(name) if packed else name, kind)
    else:
        stem, dot, kind = entry.name.rpartition(".")
        name = _OUTSIDE_LAYERS.get(entry.name) or _OUTSIDE_LAYERS.get(stem)
        suffix = "" if entry.name in _OUTSIDE_LAYERS else dot + kind
        yield dataclasses.replace(entry, place=Place(name + suffix)) if name else entry


def _renamed(entry: TensorEntry, within: str, name: str | None, kind: str) -> TensorEntry:
    return dataclasses.replace(entry, place=Place(f"{within}.{name}{kind}")) if name else entry


def _three(entry: TensorEntry, within: str, kind: str, groups: int, shares: Sequence[int]) -> Iterator[TensorEntry]:
    """Queries, keys and values out of one tensor: `groups` times, in turn, a share of rows for each of them."""
    rows, unit = entry.shape[0] if entry.shape else 0, groups * sum(shares)
    if not rows or rows % unit:
        raise CheckpointError(
            f"{entry.file}: the tensor '{entry.name}' has {rows} rows, which are not {unit} equal parts; "
            "give the checkpoint that belongs to this config.json"
        )
    row_bytes, at = entry.nbytes // rows, 0
    for group in range(groups):
        for letter, share in zip("qkv", shares, strict=True):
            count = share * rows // unit
            start = entry.start + at * row_bytes
            yield dataclasses.replace(
                entry,
                shape=(count, *entry.shape[1:]),
                start=start,
                end=start + count * row_bytes,
                place=Place(f"{within}.{letter}_proj{kind}", group * count),
            )
            at += count
