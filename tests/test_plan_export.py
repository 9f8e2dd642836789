"""The flags for other engines: put through each engine's own arithmetic, they come to the same KV cache."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.compose import compose
from orchestrator.plan.engines import Ask, Exported, lmdeploy, sglang, vllm
from orchestrator.plan.footprint import Footprint
from orchestrator.units import GiB, MiB

FOOTPRINT = Footprint(
    total_bytes=80 * GiB,
    driver_bytes=9 * MiB,
    accounts={"weights": 15 * GiB, "context": 610 * MiB, "non_torch": 76 * MiB, "cudagraph": 500 * MiB},
    peak_bytes=2 * GiB,
    peaks={"language_model": 2 * GiB, "encoder.image": GiB},
    bytes_per_block=2 * MiB,
    block_size=16,
    page_bytes=2 * MiB,
    max_model_len=32768,
    max_num_seqs=256,
    media_tokens={"image": 3328},
)
VOCABULARY = 92553


def ask(*overrides: str, text_only: bool = False, util: float = 0.9, dtype: str = "bfloat16") -> Ask:
    config = compose(["device=plan", "gpu=h100_80g", "model=internvl2_5_8b", *overrides]).config
    footprint = replace(FOOTPRINT, media_tokens={}) if text_only else FOOTPRINT
    sizes = () if config.graphs.mode == "none" else (256, 8, 1)
    return Ask(config, footprint, footprint.at(util), "org/model", dtype, sizes, VOCABULARY, not text_only)


def flag(exported: Exported, name: str) -> str:
    return exported.command[exported.command.index(name) + 1]


def test_vllm_gets_the_same_blocks() -> None:
    wanted = ask()
    out = vllm(wanted)
    assert out.command[:3] == ["vllm", "serve", "org/model"]
    size = int(flag(out, "--kv-cache-memory-bytes"))
    # One block is nobody's there, too.
    assert size // wanted.footprint.bytes_per_block - 1 == wanted.fit.blocks
    # Its own arithmetic: the share of the total, less what was taken since the context, and the peak.
    accounts = wanted.footprint.accounts
    taken = accounts["weights"] + accounts["non_torch"] + accounts["cudagraph"] + wanted.footprint.peak_bytes
    share = float(flag(out, "--gpu-memory-utilization"))
    assert size <= share * 80 * GiB - taken <= size + 0.001 * 80 * GiB
    assert share < 0.9
    assert flag(out, "--max-model-len") == "32768"
    assert flag(out, "--max-num-batched-tokens") == "16384"
    assert json.loads(flag(out, "--limit-mm-per-prompt")) == {"image": 1, "video": 0, "audio": 0}
    assert json.loads(flag(out, "--compilation-config")) == {"cudagraph_capture_sizes": [1, 8, 256]}


def test_vllm_is_told_of_media_and_of_no_graphs() -> None:
    given = ["mm.image.max_size=[1024,768]", "mm.processor_kwargs={max_patches: 6}", "graphs.mode=none"]
    out = vllm(ask(*given, "mm.limit_per_prompt={image: 4, video: 1}", "mm.video.max_frames=16"))
    limits: dict[str, Any] = json.loads(flag(out, "--limit-mm-per-prompt"))
    assert limits["image"] == {"count": 4, "width": 1024, "height": 768}
    assert limits["video"] == {"count": 1, "num_frames": 16}
    assert json.loads(flag(out, "--mm-processor-kwargs")) == {"max_patches": 6}
    assert "--enforce-eager" in out.command and "--compilation-config" not in out.command
    assert any("only shape the profile run" in line for line in out.cannot)


def test_sglang_gets_the_same_tokens() -> None:
    wanted = ask()
    out = sglang(wanted)
    assert int(flag(out, "--max-total-tokens")) == wanted.fit.tokens
    # Its own arithmetic: what is free after the weights, less the other share of what was free before them.
    before = wanted.footprint.free_bytes - wanted.footprint.accounts["context"]
    after = before - wanted.footprint.accounts["weights"]
    pool = after - before * (1 - float(flag(out, "--mem-fraction-static")))
    assert wanted.kv_bytes <= pool <= wanted.kv_bytes + 0.001 * before
    start = out.command.index("--cuda-graph-bs")
    assert out.command[start + 1 : start + 4] == ["1", "8", "256"]
    assert json.loads(flag(out, "--limit-mm-data-per-request"))["image"] == 1


def test_lmdeploy_gets_as_many_blocks_but_for_its_rounding() -> None:
    wanted = ask()
    out = lmdeploy(wanted)
    share = float(flag(out, "--cache-max-entry-count"))
    accounts = wanted.footprint.accounts
    free = wanted.footprint.free_bytes - accounts["context"] - accounts["weights"]
    rows = (16384 + 2 * 256) * VOCABULARY * 2
    assert 0 <= wanted.kv_bytes - share * (free - rows) <= 0.001 * free
    assert 0 < share < 1
    assert flag(out, "--cache-block-seq-len") == "16"
    assert any("mm.limit_per_prompt" in line for line in out.cannot)


def test_a_type_of_32_bits_is_named_where_there_is_one() -> None:
    wanted = ask("model.dtype=auto", dtype="float32")
    assert [flag(engine(wanted), "--dtype") for engine in (vllm, sglang)] == ["float32", "float32"]
    out = lmdeploy(wanted)
    assert "--dtype" not in out.command and any(line.startswith("model.dtype=float32") for line in out.cannot)


def test_lmdeploy_says_where_its_formula_leaves_too_little() -> None:
    out = lmdeploy(ask("scheduler.max_num_batched_tokens=262144"))
    assert "--cache-max-entry-count" not in out.command
    assert "this KV cache" in out.cannot[0]


@pytest.mark.parametrize("engine", [vllm, sglang, lmdeploy])
def test_a_text_model_has_no_flags_of_media(engine: Any) -> None:
    out = engine(ask("mm.limit_per_prompt.image=0", text_only=True))
    assert not [word for word in out.command if "mm" in word]
    assert not [line for line in out.cannot if "encoder" in line]


@pytest.mark.parametrize("engine", [vllm, sglang, lmdeploy])
def test_what_a_model_is_named_by_goes_along(engine: Any) -> None:
    out = engine(ask("model.revision=main", "model.dtype=auto", "kv.dtype=float32"))
    assert flag(out, "--revision") == "main"
    assert flag(out, "--dtype") == "bfloat16"
    assert "--trust-remote-code" in out.means[0] and "--trust-remote-code" not in out.command
    assert any(line.startswith("kv.dtype=float32") for line in out.cannot)
    assert out.means and all(line.startswith("--") for line in out.means)
