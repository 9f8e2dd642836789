"""Plans: the same start without a device, its ledger predicted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import orchestrator
from orchestrator.compose import compose
from orchestrator.config import Config, GpuSpec, engine_name
from orchestrator.device.base import Device, Graph
from orchestrator.device.fake import FakeDevice
from orchestrator.device.plan import PlanDevice
from orchestrator.engine.planning.engine import PlannedEngine
from orchestrator.engine.planning.results import PlanError
from orchestrator.engine.planning.shapes import Shapes
from orchestrator.engine.planning.tape import Tape
from orchestrator.engine.transformers import TransformersEngine
from orchestrator.errors import CheckpointError, ConfigError, DeviceOutOfMemoryError, StageError
from orchestrator.events import SilentEvents
from orchestrator.planned import config_of_plan
from orchestrator.planning import plan
from orchestrator.records import RunRecord
from orchestrator.registry import Registry
from orchestrator.tensorfile import SINGLE_NAME
from orchestrator.units import GiB, MiB
from tests.tiny_families import FAMILIES, Family
from tests.tiny_models import text_folder

ROOT = Path(__file__).resolve().parent.parent
NEED_PIXELS = {"smolvlm", "idefics3"}
"""Families whose models look for pictures that are padding, so that their pixels decide what is computed."""


def config_of(*overrides: str) -> Config:
    return config_of_plan(compose(["device=plan", "gpu=h200", *overrides]).config)


def spec_of(*overrides: str) -> GpuSpec:
    spec = config_of(*overrides).gpu.spec
    assert spec is not None
    return spec


def metrics(record: RunRecord, use: str) -> dict[str, Any]:
    return next(stage.metrics for stage in record.stages if stage.use == use)


def refusal(overrides: Sequence[str]) -> str:
    record = plan(overrides)
    assert record.error is not None
    return record.error.message


@pytest.fixture(scope="module")
def embedded() -> RunRecord:
    return plan(["gpu=h200"])


def test_the_command_line_plans(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "orchestrator", "device=plan", "gpu=h200", f"run.dir={tmp_path / 'run'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a plan computes nothing that could be verified" in done.stdout + done.stderr
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["ledger"]["source"] == "planned"
    assert record["device"]["name"] == "NVIDIA H200"
    assert record["plan"]["ledger"] == record["ledger"]
    assert record["plan"]["kv_cache"] == record["kv_cache"]
    assert record["plan"]["bound_bytes"] == round(record["plan"]["bound_fraction"] * 150_109_880_320)


def test_a_plan_is_whole(embedded: RunRecord) -> None:
    assert embedded.status == "ok"
    statuses = {stage.use: stage.status for stage in embedded.stages}
    assert statuses.pop("verify") == "skipped"
    assert set(statuses.values()) == {"ok"}
    ledger = embedded.ledger
    assert ledger is not None
    assert all(ledger.accounts[name] > 0 for name in ("weights", "context", "cudagraph", "kv_cache", "peak_activation"))
    assert 0 <= ledger.residual_bytes < MiB
    assert embedded.kv_cache is not None
    assert embedded.kv_cache.num_gpu_blocks == 2048


@pytest.mark.parametrize(
    ("mode", "util", "library_bytes"),
    [("none", 0.37, 148 * MiB), ("none", 0.9, MiB), ("estimate", 0.83, 148 * MiB), ("keep", 0.9, MiB)],
)
def test_what_a_start_holds_and_its_peak_are_under_the_ceiling(mode: str, util: float, library_bytes: int) -> None:
    card = ("gpu=h200", f"gpu.spec.library_bytes={library_bytes}", "gpu.total_bytes=8GiB", f"gpu.util={util}")
    short = ("scheduler.max_num_seqs=1", "scheduler.max_num_batched_tokens=16", "mm.limit_per_prompt.image=0")
    record = plan([*card, *short, "kv.bytes=auto", f"graphs.mode={mode}"])
    assert record.error is None, record.error
    ledger = record.ledger
    assert ledger is not None
    assert (
        ledger.held_bytes == sum(ledger.accounts.values()) - ledger.accounts["peak_activation"] + ledger.residual_bytes
    )
    assert 0 <= ledger.unused_bytes < 32 * MiB
    assert abs(ledger.residual_bytes) < 32 * MiB


def test_nothing_touches_a_gpu(embedded: RunRecord) -> None:
    assert embedded.status == "ok"
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def test_no_pixels_are_made(embedded: RunRecord) -> None:
    dummy = metrics(embedded, "dummy_data")
    assert dummy["processor_calls"] == 0
    assert dummy["modalities"]["image"]["cache"] == "not needed"
    assert dummy["modalities"]["image"]["tokens"] == 832


def test_a_plan_needs_a_card() -> None:
    with pytest.raises(ConfigError, match=r"device.kind=plan: there is no card to plan for; gpu=h200"):
        plan(["model=opt_125m"])


def test_only_plans_are_planned() -> None:
    with pytest.raises(ConfigError, match=r"device\.kind=cpu"):
        plan(compose(["device=cpu"]).config)


def test_another_engine_cannot_be_planned() -> None:
    with pytest.raises(ConfigError, match=r"engine\.name=vllm: device=plan knows the engine transformers alone"):
        plan(["gpu=h200", "engine.name=vllm"])


def test_a_plans_engine_starts_nothing() -> None:
    with pytest.raises(ConfigError, match=r"engine\.name=plan: .* transformers works here"):
        engine_name(compose(["device=cpu", "engine.name=plan"]).config)


def test_a_folder_that_no_start_loads_is_not_planned_either(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "model")
    given = ["gpu=h200", "model=auto", f"model.path={folder}", "scheduler.max_num_batched_tokens=64"]
    whole = plan(given)
    assert whole.status == "ok", whole.error
    tensors = load_file(folder / SINGLE_NAME)
    name = "model.layers.1.mlp.down_proj.weight"
    save_file({**tensors, name: tensors[name][:8].clone()}, folder / SINGLE_NAME)
    assert f"the tensor '{name}' has the shape [8, 128]" in refusal(given)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, folder / SINGLE_NAME)
    assert f"1 of the model's tensors are not in it: {name}" in refusal(given)
    (folder / SINGLE_NAME).rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="holds its weights only as pickles"):
        plan(given)
    # Without weights of any kind the configuration says enough.
    (folder / "pytorch_model.bin").unlink()
    assert plan(given).ledger == whole.ledger


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    record = plan(["gpu=h200", "gpu.total_bytes=1100MiB", "kv.bytes=auto", "scheduler.max_model_len=32768"])
    assert record.status == "failed"
    assert record.error is not None
    assert record.error.type == "BudgetError"
    assert "could work" in record.error.message or "would work" in record.error.message


def test_kv_grows_with_the_share_by_exactly_that_share() -> None:
    small, large = (plan(["gpu=h200", "kv.bytes=auto", f"gpu.util={util}"]) for util in (0.5, 0.75))
    assert small.kv_cache is not None
    assert large.kv_cache is not None
    grown = (large.kv_cache.num_gpu_blocks - small.kv_cache.num_gpu_blocks) * small.kv_cache.bytes_per_block
    assert abs(grown - 0.25 * 150_109_880_320) < 4 * MiB
    assert metrics(small, "profile_run")["peaks_bytes"] == metrics(large, "profile_run")["peaks_bytes"]


def test_a_planned_engine_serves_nothing() -> None:
    with orchestrator.start(["device=plan", "gpu=h200"]) as started, pytest.raises(StageError, match="serves no"):
        started.engine.generate([])


def test_the_plan_is_a_device_like_any_other() -> None:
    assert isinstance(PlanDevice(spec_of()), Device)


def test_a_card_of_an_older_kind_has_no_bfloat16() -> None:
    old = spec_of().model_copy(update={"capability": "7.5"})
    assert "bfloat16" not in PlanDevice(old).dtypes


def test_memory_that_is_mapped_is_the_cards() -> None:
    device = PlanDevice(spec_of())
    device.open()
    before = device.snapshot()
    reserved = device.reserve(GiB)
    assert reserved.grow(3 * MiB) == 4 * MiB
    assert device.snapshot().ours_bytes == before.ours_bytes + 4 * MiB
    reserved.close()
    assert device.snapshot() == before
    with pytest.raises(DeviceOutOfMemoryError, match="no memory left"):
        device.reserve(1000 * GiB).grow(1000 * GiB)


@pytest.fixture
def running() -> tuple[PlanDevice, Shapes]:
    device = PlanDevice(spec_of())
    return device, Shapes(Tape(device))


def test_every_tensor_is_counted_while_it_lives(running: tuple[PlanDevice, Shapes]) -> None:
    device, shapes = running
    with shapes.running(), torch.inference_mode():
        first = torch.zeros(1000, 1000, device="meta")
        assert device.snapshot().allocated_bytes == 4_000_256
        view = first[:10]
        second = first + 1
        assert device.snapshot().allocated_bytes == 2 * 4_000_256
        del first, second
        assert device.snapshot().allocated_bytes == 4_000_256
        del view
    assert device.snapshot().allocated_bytes == 0
    assert device.snapshot().peak_bytes == 2 * 4_000_256


def test_numbers_of_the_host_are_known(running: tuple[PlanDevice, Shapes]) -> None:
    _, shapes = running
    with shapes.running(), torch.inference_mode():
        grid = torch.tensor([[2, 3]]).to("meta")
        assert grid.prod().item() == 6
        assert (grid + torch.tensor([1, 1], device="meta")).tolist() == [[3, 4]]
        mask = torch.arange(6, device="meta") % 2 == 0
        assert torch.zeros(6, 8, device="meta")[mask].shape == (3, 8)
        mask[1] = True
        assert mask.nonzero().shape == (4, 1)


def test_what_only_a_device_knows_is_named(running: tuple[PlanDevice, Shapes]) -> None:
    _, shapes = running

    class Router(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> list[float]:
            numbers: list[float] = hidden.sum(0).tolist()
            return numbers

    with shapes.running(), torch.inference_mode(), pytest.raises(PlanError, match=r"Router cannot be planned"):
        Router()(torch.zeros(4, 4, device="meta"))


def test_what_torch_has_no_shapes_for_is_named(running: tuple[PlanDevice, Shapes]) -> None:
    _, shapes = running

    class Experts(torch.nn.Module):
        def forward(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ends = torch.tensor([4, 8], dtype=torch.int32, device="meta")
            return torch.nn.functional.grouped_mm(rows, weight, offs=ends)

    experts, rows, weight = Experts(), torch.zeros(8, 16, device="meta"), torch.zeros(2, 16, 16, device="meta")
    with shapes.running(), torch.inference_mode():
        assert experts(rows.bfloat16(), weight.bfloat16()).shape == (8, 16)
        with pytest.raises(PlanError, match=r"_grouped_mm\.default in Experts cannot be planned: "):
            experts(rows.double(), weight.double())


def test_a_product_keeps_a_workspace_for_each_stream(running: tuple[PlanDevice, Shapes]) -> None:
    device, shapes = running
    workspace = device.spec.workspace_bytes

    def work() -> None:
        one = torch.zeros(64, 64, device="meta")
        torch.mm(one, one)

    with shapes.running(), torch.inference_mode():
        work()
        work()
        assert device.snapshot().allocated_bytes == workspace
        device.capture(work, device.graph_pool())
        device.capture(work, device.graph_pool())
        assert device.snapshot().allocated_bytes == 2 * workspace


def test_graphs_that_are_dropped_give_their_memory_back(running: tuple[PlanDevice, Shapes]) -> None:
    device, shapes = running

    def work() -> torch.Tensor:
        return torch.zeros(1024, 1024, device="meta") + 1

    def captured() -> list[Graph]:
        pool = device.graph_pool()
        return [device.capture(work, pool) for _ in range(3)]

    with shapes.running(), torch.inference_mode():
        captured()
        device.empty_cache()
        before = device.snapshot().ours_bytes
        graphs = captured()
        assert device.snapshot().ours_bytes > before
        del graphs
        device.empty_cache()
        assert device.snapshot().ours_bytes == before


def test_attention_takes_what_its_kernel_does(running: tuple[PlanDevice, Shapes]) -> None:
    device, shapes = running
    attend = torch.nn.functional.scaled_dot_product_attention
    with shapes.running(), torch.inference_mode():
        query, key = (torch.zeros(1, heads, 4096, 128, dtype=torch.bfloat16, device="meta") for heads in (8, 2))
        device.reset_peak()
        before = device.snapshot().allocated_bytes
        output = attend(query, key, key, is_causal=True, enable_gqa=True)
        # The result and, for a moment, a float32 for each row and head: no scores.
        assert output.shape == query.shape
        assert device.snapshot().peak_bytes - before == 8 * 4096 * (128 * 2 + 4)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_families_are_planned_or_named(family: Family, tmp_path: Path) -> None:
    limits = ("scheduler.max_model_len=256", "scheduler.max_num_batched_tokens=96", "scheduler.max_num_seqs=3")
    record = plan(["gpu=h200", "model=auto", f"model.path={family.folder(tmp_path / 'model')}", *limits])
    if family.name in NEED_PIXELS:
        assert record.error is not None
        assert record.error.type == "PlanError"
        assert "Model cannot be planned" in record.error.message
    else:
        assert record.status == "ok", record.error
        assert set(metrics(record, "profile_run")["allocated_bytes"]) >= {"language_model", "encoder.image"}


@pytest.mark.parametrize("model", ["tiny_internvl", "opt_125m"])
def test_layers_that_repeat_do_what_running_each_does(model: str) -> None:
    readings = []
    for repeats in (True, False):
        config = config_of(f"model={model}", "scheduler.max_model_len=2048")
        device = PlanDevice(spec_of())
        device.open()
        engine = PlannedEngine(config, device, Registry.discover().resolve, None, repeats=repeats)
        engine.load(SilentEvents())
        engine.reserve_encoder_cache(512)
        engine.dummy_step(2048, 1024)
        engine.kv_bytes(0)
        engine.capture([8, 1])
        readings.append((device.snapshot(), device.kernels))
        engine.close()
    assert readings[0] == readings[1]


def test_a_start_that_cannot_fit_its_step_ends_before_its_weights_are_read(tmp_path: Path) -> None:
    config = compose(["model=internvl2_5_8b", "model.load_format=dummy", f"cache.dir={tmp_path}"]).config
    device = FakeDevice(150 * GiB)
    engine = TransformersEngine(config, device, Registry.discover().resolve, None)
    seen: list[int] = []

    def admit(weights: int) -> None:
        seen.append(engine.least_peak())
        raise StageError("enough is known")

    with pytest.raises(StageError, match="enough"):
        engine.load(SilentEvents(), admit)
    # Of 16,384 tokens, what an H200 reserved for such a step was 1.96 GiB.
    assert seen[0] == pytest.approx(2_107_637_760, rel=0.06)
    assert engine.least_peak() == 0
