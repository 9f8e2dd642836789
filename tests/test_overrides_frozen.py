"""The promise: every path that a user can override. Paths may be added; one that is removed or renamed breaks users."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.compose import compose
from orchestrator.registry import Registry

OVERRIDES = [
    "cache.dir",
    "cache.enabled",
    "cache.max_bytes",
    "device.kind",
    "encoder.cache_size",
    "encoder.compute_budget",
    "encoder.micro_batch",
    "engine.attention",
    "engine.name",
    "engine.tensor_parallel_size",
    "gpu.index",
    "gpu.spec",
    "gpu.total_bytes",
    "gpu.util",
    "graphs.mode",
    "graphs.sizes",
    "kv.block_size",
    "kv.bytes",
    "kv.dtype",
    "log.json",
    "mm.audio.max_seconds",
    "mm.image.max_size",
    "mm.limit_per_prompt.audio",
    "mm.limit_per_prompt.image",
    "mm.limit_per_prompt.video",
    "mm.processor_kwargs",
    "mm.video.max_frames",
    "mm.video.max_size",
    "model.dtype",
    "model.load_format",
    "model.name",
    "model.path",
    "model.profiler",
    "model.revision",
    "model.trust_remote_code",
    "run.dir",
    "run.seed",
    "run.skip_existing",
    "scheduler.max_model_len",
    "scheduler.max_num_batched_tokens",
    "scheduler.max_num_seqs",
    "stages.allocate_kv.timeout_s",
    "stages.allocate_kv.use",
    "stages.clear_caches.timeout_s",
    "stages.clear_caches.use",
    "stages.dummy_data.timeout_s",
    "stages.dummy_data.use",
    "stages.graph_capture.timeout_s",
    "stages.graph_capture.use",
    "stages.load_weights.timeout_s",
    "stages.load_weights.use",
    "stages.profile_run.timeout_s",
    "stages.profile_run.use",
    "stages.verify.images",
    "stages.verify.max_tokens",
    "stages.verify.mode",
    "stages.verify.num_requests",
    "stages.verify.timeout_s",
    "stages.verify.tolerance",
    "stages.verify.use",
    "startup_plan",
    "weights.chunk_bytes",
    "weights.io",
    "weights.loader",
    "weights.threads",
]

STAGES = ["load_weights", "dummy_data", "profile_run", "graph_capture", "clear_caches", "allocate_kv", "verify"]


def leaves(node: Any, path: str = "") -> list[str]:
    if not isinstance(node, dict) or not node:
        return [path]
    return [leaf for key, value in node.items() for leaf in leaves(value, f"{path}.{key}" if path else key)]


def test_the_override_paths() -> None:
    assert sorted(leaves(compose([]).raw)) == sorted(OVERRIDES)


def test_the_stages_and_their_order() -> None:
    assert list(compose([]).raw["stages"]) == STAGES


@pytest.mark.parametrize("name", STAGES)
def test_an_option_has_the_same_default_in_its_yaml_and_in_its_config(name: str) -> None:
    config = Registry.discover().resolve("stages", name).Config
    assert compose([]).raw["stages"][name] == config(use=name).model_dump()
