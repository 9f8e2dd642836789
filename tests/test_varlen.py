"""PyTorch's paged attention: what it is called with, what it refuses, and that only its name chooses it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from orchestrator.engine.attention.base import AttentionMetadata
from orchestrator.engine.attention.varlen import VarlenAttention, version_of
from orchestrator.engine.build import attention_backend
from orchestrator.engine.planning.attention import BACKENDS
from orchestrator.errors import ConfigError
from orchestrator.registry import Registry


@pytest.mark.parametrize(("window", "size"), [(None, (-1, 0)), (20, (19, 0)), (1, (0, 0))])
def test_it_is_called_with_the_cache_and_the_tables(window: int | None, size: tuple[int, int]) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def noted(*arguments: Any, **options: Any) -> torch.Tensor:
        calls.append((arguments, options))
        assert isinstance(arguments[0], torch.Tensor)
        return arguments[0]

    meta = replace(AttentionMetadata.build([(300, 301), (0, 7)], [[2, 1], [3]], 256, "cpu"), window=window)
    query, cache = torch.randn(8, 4, 64), torch.randn(4, 256, 2, 64)
    new = torch.randn(8, 2, 64)
    output = VarlenAttention(noted).attend(query, new, new, cache, cache, meta, 0.5)
    ((q, k, v, starts, key_starts, longest_query, longest), options) = calls[0]
    assert output is q and k is cache and v is cache and key_starts is None
    assert starts.tolist() == [0, 1, 8] and (longest_query, longest) == (7, 301)
    assert options["block_table"].tolist() == [[2, 1], [3, 0]] and options["seqused_k"].tolist() == [301, 7]
    assert (options["window_size"], options["scale"], options["enable_gqa"]) == (size, 0.5, True)


def test_its_arguments_exist() -> None:
    import inspect

    from torch.nn.attention import varlen

    known = inspect.signature(varlen.varlen_attn).parameters
    assert {"scale", "window_size", "enable_gqa", "seqused_k", "block_table"} <= set(known)


@pytest.mark.parametrize(
    ("device", "dtype", "head", "block", "words"),
    [
        ("cuda", "bfloat16", 128, 16, "blocks of 256 tokens or a multiple (kv.block_size=256), not 16"),
        ("cuda", "float32", 128, 256, "the element type float32, only bfloat16, float16"),
        ("cuda", "bfloat16", 320, 256, "up to 256, not 320"),
        ("cuda", "bfloat16", 36, 256, "a size that 8 divides, up to 256, not 36"),
        ("cpu", "bfloat16", 128, 256, "devices of kind cpu, only cuda"),
        ("cpu", "bfloat16", 128, 16, "devices of kind cpu, only cuda"),
    ],
)
def test_what_it_refuses(device: str, dtype: str, head: int, block: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        attention_backend(
            "varlen", Registry.discover().resolve, device=device, dtype=dtype, head_size=head, block_size=block
        )
    assert words in str(caught.value) and "engine.attention" in str(caught.value)


def test_an_older_torch_is_told_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu128")
    refusal = VarlenAttention.refusal("cuda", "bfloat16", 128, 256)
    assert refusal == "it needs torch 2.13 or newer, and this is 2.11.0+cu128"
    assert version_of("2.13.0a0+git1") == (2, 13)


def test_a_plan_refuses_what_a_start_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu128")
    planned = BACKENDS["varlen"]
    assert planned.refusal("meta", "bfloat16", 128, 256) is None
    for dtype, head, block in (("bfloat16", 128, 16), ("float32", 128, 256), ("bfloat16", 36, 256)):
        assert planned.refusal("meta", dtype, head, block) is not None


def test_auto_never_chooses_it() -> None:
    resolve = Registry.discover().resolve
    for device in ("cuda", "cpu"):
        for block in (16, 256):
            found = attention_backend("auto", resolve, device=device, dtype="bfloat16", head_size=128, block_size=block)
            assert found.name == ("triton" if device == "cuda" else "reference")
    chosen = attention_backend("varlen", resolve, device="cuda", dtype="bfloat16", head_size=128, block_size=512)
    assert chosen.name == "varlen" and not chosen.graph_safe
