"""What follows from a footprint, against the starts that were measured on an H200."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.compose import compose
from orchestrator.config import Config
from orchestrator.plan.footprint import Footprint, footprint_of
from orchestrator.records import RunRecord
from orchestrator.units import MiB
from tests.gpu.sources import read_records

MEASURED = ("flagship_16k", "internvl2_5_8b", "qwen2_5_vl_3b", "qwen2_5_vl_3b_media")


def measured(name: str) -> tuple[RunRecord, Config]:
    record = RunRecord.model_validate({"run_id": name, **read_records()[name]["result"]})
    settings = [text for text in record.overrides if not text.startswith(("run.dir=", "device="))]
    return record, compose(["device=cuda", *settings]).config


def of(name: str) -> tuple[Footprint, float, RunRecord]:
    record, config = measured(name)
    return footprint_of(record, config), config.gpu.util, record


@pytest.mark.parametrize("name", MEASURED)
def test_the_arithmetic_is_that_of_a_start(name: str) -> None:
    footprint, util, record = of(name)
    assert record.ledger is not None and record.kv_cache is not None
    fit = footprint.at(util)
    assert fit.fits and fit.limited_by == "util"
    # What verify left behind was not there yet when the cache was sized; and blocks are whole.
    apart = abs(fit.blocks - record.kv_cache.num_gpu_blocks) - 1
    assert apart * footprint.bytes_per_block <= record.ledger.residual_bytes
    assert fit.max_concurrency == pytest.approx(record.kv_cache.max_concurrency, rel=1e-4)
    assert footprint.max_model_len == 32768


def test_a_larger_share_leaves_more_and_one_that_is_not_free_is_refused() -> None:
    footprint, _, _ = of("internvl2_5_8b")
    blocks = [footprint.at(step / 100).blocks for step in range(30, 100)]
    assert blocks == sorted(blocks) and blocks[0] < blocks[-1]
    everything = footprint.at(1.0)
    assert (everything.fits, everything.blocks) == (False, 0)
    assert "are free" in everything.refusal and everything.suggestions == {"gpu.util": "0.99"}


def test_what_does_not_fit_says_which_settings_would() -> None:
    footprint, _, _ = of("internvl2_5_8b")
    small = footprint.at(0.14)
    assert not small.fits
    assert set(small.suggestions) >= {"gpu.util"}
    util = float(small.suggestions["gpu.util"])
    assert footprint.at(util).fits and not footprint.at(util - 0.01).fits
    # Where something is left, a shorter sequence has room in it.
    some = footprint.at(util - 0.01)
    if length := some.suggestions.get("scheduler.max_model_len"):
        assert replace(footprint, max_model_len=int(length)).at(util - 0.01).fits


def test_a_size_that_was_asked_for_knows_no_share() -> None:
    footprint, _, _ = of("internvl2_5_8b")
    asked = replace(footprint, wanted_blocks=4096)
    assert [asked.at(util).blocks for util in (0.1, 0.9)] == [4096, 4096]
    assert asked.at(0.9).limited_by == "kv.bytes"
    assert replace(asked, wanted_blocks=100_000).at(0.9).suggestions.keys() == {"kv.bytes"}
    need = replace(asked, most_seqs=2)
    assert need.at(0.9).limited_by == "need"


def test_blocks_come_in_whole_pages_with_one_for_padding() -> None:
    footprint, _, _ = of("qwen2_5_vl_3b")
    assert footprint.bytes_per_block == 589_824
    assert footprint.kv_bytes(0) == 2 * MiB
    assert footprint.kv_bytes(6) == 4 * MiB
    assert replace(footprint, page_bytes=1).kv_bytes(6) == 7 * 589_824


def test_another_card_changes_its_constants_alone() -> None:
    footprint, _, _ = of("internvl2_5_8b")
    h200, l4 = (compose(["device=plan", f"gpu={card}"]).config.gpu.spec for card in ("h200", "l4"))
    assert h200 is not None and l4 is not None
    moved = footprint.on(l4, l4.total_bytes, h200)
    changed = {name for name in footprint.accounts if moved.accounts[name] != footprint.accounts[name]}
    assert changed == {"context"}
    assert moved.free_bytes == l4.total_bytes - l4.driver_bytes
    assert moved.at(0.95).blocks < footprint.at(0.95).blocks
    assert footprint.on(h200, h200.total_bytes, h200) == replace(footprint, driver_bytes=h200.driver_bytes)
