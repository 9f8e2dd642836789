"""Captured decode steps: the same tokens as eager ones, padded to the next size, and only where a step was captured.

The fake device replays by doing the work again on the same input tensors, so what is tested is all but the hardware.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch

from orchestrator.device.fake import FakeDevice
from orchestrator.engine.attention.base import AttentionBackend, AttentionMetadata
from orchestrator.engine.attention.reference import ReferenceAttention
from orchestrator.engine.base import Output, Request
from orchestrator.engine.transformers import TransformersEngine
from orchestrator.events import SilentEvents
from orchestrator.registry import Registry
from orchestrator.units import GiB, MiB
from tests.toy import composed, resolver


class DeviceLengths(AttentionBackend):
    """The reference, but reading lengths from the device's tensors, as a backend that can be captured must."""

    name: ClassVar[str] = "device_lengths"
    graph_safe: ClassVar[bool] = True

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        lengths = tuple(meta.seq_lens.tolist())
        now = AttentionMetadata(**{**vars(meta), "lengths": lengths, "max_seq_len": max(lengths)})
        return ReferenceAttention().attend(query, key, value, k_cache, v_cache, now, scale)


def engine(folder: Path, backend: type[AttentionBackend] = DeviceLengths, mode: str = "estimate") -> TransformersEngine:
    registry = Registry.discover()
    names = {("attention", "mine"): backend, ("loaders", "safetensors"): registry.resolve("loaders", "safetensors")}
    config = composed(
        "model=auto",
        f"model.path={folder}",
        "engine.attention=mine",
        "scheduler.max_model_len=256",
        f"graphs.mode={mode}",
    )
    device = FakeDevice(GiB, supports_graphs=True, granularity=MiB)
    made = TransformersEngine(config, device, resolver(names), None)
    made.load(SilentEvents())
    made.reserve_encoder_cache(64)
    return made


def serve(served: TransformersEngine, count: int) -> list[Output]:
    texts = [f"Question {number}: {'why ' * number}" for number in range(count)]
    return served.generate([Request(str(at), text, max_tokens=6, ignore_eos=True) for at, text in enumerate(texts)])


@pytest.fixture(scope="module")
def eager(tiny_folder: Path) -> list[Output]:
    served = engine(tiny_folder)
    served.allocate_kv(64)
    return serve(served, 5)


def test_replayed_steps_give_the_same_tokens(tiny_folder: Path, eager: list[Output]) -> None:
    served = engine(tiny_folder)
    assert [graph.size for graph in served.capture([2, 8])] == [8, 2]
    served.allocate_kv(64)
    served.capture([2, 8])
    outputs = serve(served, 5)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in eager]
    assert [output.logprobs for output in outputs] == [pytest.approx(output.logprobs, abs=1e-5) for output in eager]


def test_a_cache_of_its_own_is_not_touched_by_padding(tiny_folder: Path, eager: list[Output]) -> None:
    served = engine(tiny_folder)
    served.allocate_kv(64)
    served.capture([8])
    assert [output.token_ids for output in serve(served, 3)] == [output.token_ids for output in eager[:3]]
    cache = served._need_memory().cache
    assert cache is not None
    # Padding rows write to the padding block, and to no block that nobody was given.
    assert cache.storage[0].abs().sum() > 0
    assert cache.storage[40:].abs().sum() == 0


def test_a_batch_larger_than_was_captured_runs_eagerly(tiny_folder: Path, eager: list[Output]) -> None:
    served = engine(tiny_folder)
    served.allocate_kv(64)
    served.capture([1, 2])
    assert [output.token_ids for output in serve(served, 5)] == [output.token_ids for output in eager]


def test_a_backend_that_cannot_be_captured_is_not(tiny_folder: Path) -> None:
    assert engine(tiny_folder, ReferenceAttention).capture([1, 2]) == []


def test_kept_graphs_serve_on_blocks_that_got_memory_later(tiny_folder: Path, eager: list[Output]) -> None:
    served = engine(tiny_folder, mode="keep")
    served.capture([2, 8])
    kept = served._need_memory().graphs
    assert served.allocate_kv(64) == served.kv_bytes(64)
    assert served._need_memory().graphs is kept
    assert [output.token_ids for output in serve(served, 5)] == [output.token_ids for output in eager]


def test_blocks_may_get_memory_before_graphs_are_captured(tiny_folder: Path, eager: list[Output]) -> None:
    served = engine(tiny_folder, mode="keep")
    served.allocate_kv(64)
    served.capture([8])
    assert [output.token_ids for output in serve(served, 5)] == [output.token_ids for output in eager]


def test_mapped_memory_comes_in_whole_pages_and_goes_back(tiny_folder: Path) -> None:
    served = engine(tiny_folder, mode="keep")
    assert served.kv_bytes(0) == MiB
    assert served.kv_bytes(64) == 5 * MiB
    served.allocate_kv(64)
    device = served._device
    assert device.snapshot().ours_bytes == 5 * MiB
    served.close()
    assert device.snapshot().ours_bytes == 0
