"""Each family through the whole pipeline on a CPU: its folder is all that is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import orchestrator
from orchestrator.errors import UserError
from orchestrator.modality.blank import blank_image
from orchestrator.modality.generic import GenericProfiler
from orchestrator.modality.search import candidate_sizes
from tests.tiny_families import FAMILIES, Family, text_only
from tests.tiny_models import make_config

LARGEST = (130, 100)
WIDTHS = {"qwen3_vl": 3 * 64}
"""Elements of a row of the encoder cache where they are more than an embedding's."""


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.param
    return found


@pytest.fixture(scope="module")
def folder(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.folder(tmp_path_factory.mktemp(family.name))


def start(folder: Path, where: Path, *overrides: str) -> Any:
    limits = ("scheduler.max_num_seqs=3", "scheduler.max_num_batched_tokens=96", "scheduler.max_model_len=256")
    places = (f"model.path={folder}", f"run.dir={where / 'run'}", f"cache.dir={where / 'cache'}")
    return orchestrator.start(["model=auto", "device=cpu", "kv.bytes=need", *limits, *places, *overrides])


def stage(record: Any, slot: str) -> dict[str, Any]:
    metrics: dict[str, Any] = next(stage.metrics for stage in record.stages if stage.slot == slot)
    return metrics


def test_it_starts_and_is_verified(family: Family, folder: Path, tmp_path: Path) -> None:
    size = f"mm.image.max_size=[{LARGEST[0]},{LARGEST[1]}]"
    started = start(folder, tmp_path, size, "encoder.cache_size=200", "kv.block_size=8", "mm.limit_per_prompt.image=2")
    record = started.record
    assert record.status == "ok"
    assert stage(record, "verify")["images"] == 2
    assert stage(record, "verify")["largest_difference"] < 1e-3
    shape = stage(record, "dummy_data")["modalities"]["image"]["shape"]
    assert shape[0] <= LARGEST[0] and shape[1] <= LARGEST[1]
    width = WIDTHS.get(family.name, 64)
    assert record.ledger.accounts["encoder_cache"] == 200 * width * 4
    blocks = 3 * 256 // 8
    assert (record.kv_cache.block_size, record.kv_cache.num_gpu_blocks) == (8, blocks)
    assert record.ledger.accounts["kv_cache"] == (blocks + 1) * started.engine.kv_spec.bytes_per_block(8)
    started.engine.close()


def test_the_dummy_image_is_the_costliest_of_the_candidates(family: Family, folder: Path) -> None:
    processor: Any = transformers.AutoProcessor.from_pretrained(folder)  # type: ignore[no-untyped-call]
    config = transformers.AutoConfig.from_pretrained(folder)
    profiler = GenericProfiler(processor, config, make_config(folder, mm={"image": {"max_size": [230, 180]}}).mm)
    mark = getattr(config, "image_token_id", None) or config.image_token_index

    def tokens(shape: tuple[int, ...]) -> int:
        batch = processor(text=[processor.image_token], images=[blank_image(shape)], return_tensors="pt")
        return int(torch.count_nonzero(batch["input_ids"] == mark))

    best = tokens(profiler.costliest("image").shape)
    assert best >= max(tokens(shape) for shape in candidate_sizes((230, 180))[::9])


@pytest.mark.parametrize("name", ["opt", "mistral"])
def test_text_models_start(name: str, tmp_path: Path) -> None:
    started = start(text_only(tmp_path / name, name), tmp_path)
    assert started.record.status == "ok"
    assert stage(started.record, "verify")["images"] == 0
    started.engine.close()


def test_a_processor_that_cannot_count_is_named(tmp_path: Path) -> None:
    profiler = GenericProfiler(object(), None, make_config(tmp_path).mm)
    with pytest.raises(UserError, match=r"object cannot say .*_get_num_multimodal_tokens.*limit_per_prompt.image=0"):
        profiler.costliest("image")
