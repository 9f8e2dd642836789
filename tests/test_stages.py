"""The built-in stages over a fake device: what they charge, refuse and catch."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from orchestrator.artifacts import DUMMY, ENGINE, GRAPHS, KV_CACHE, PROFILE, VERIFIED
from orchestrator.device.fake import FakeDevice
from orchestrator.engine.base import KVSpec
from orchestrator.errors import BudgetError, ConfigError, StageError, StillHeldError, VerificationError
from orchestrator.modality.base import DummyBatch, MediaInputs
from orchestrator.stage import Context, Skipped
from orchestrator.stages.allocate_kv import AllocateKV
from orchestrator.stages.clear_caches import ClearCaches
from orchestrator.stages.dummy_data import DummyData
from orchestrator.stages.graph_capture import GraphCapture, capture_sizes
from orchestrator.stages.load_weights import LoadWeights
from orchestrator.stages.profile_run import ProfileRun
from orchestrator.stages.verify import Verify
from orchestrator.units import GiB
from tests.toy import Lines, ToyEngine, context

LIMITS = ("scheduler.max_num_seqs=2", "scheduler.max_num_batched_tokens=32", "kv.bytes=auto", "gpu.util=0.5")


def load(ctx: Context, engine: ToyEngine) -> None:
    ctx.resolver = lambda group, name: lambda *_: engine
    LoadWeights(LoadWeights.Config(use="load_weights")).run(ctx)


def profile(ctx: Context) -> None:
    DummyData(DummyData.Config(use="dummy_data")).run(ctx)
    ProfileRun(ProfileRun.Config(use="profile_run")).run(ctx)


def allocate(ctx: Context) -> str:
    return AllocateKV(AllocateKV.Config(use="allocate_kv")).run(ctx)


def verify(ctx: Context, **options: int | str) -> str:
    return Verify(Verify.Config(use="verify", **options)).run(ctx)  # type: ignore[arg-type]


def started(folder: Path, planted: str = "", lines: Lines | None = None) -> Context:
    device = FakeDevice(2000, context_bytes=10)
    ctx = context(device, folder, *LIMITS, events=lines)
    load(ctx, ToyEngine(device, planted=planted))
    profile(ctx)
    allocate(ctx)
    return ctx


def test_the_ledger_of_a_start_is_exact(tmp_path: Path) -> None:
    ctx = started(tmp_path)
    accounts = ctx.ledger.accounts
    blocks = (1000 - 10 - 100 - 30) // 128 - 1
    assert ctx.state.get(KV_CACHE).num_blocks == blocks == 5
    assert (accounts["weights"], accounts["context"], accounts["peak_activation"]) == (100, 10, 30)
    assert accounts["kv_cache"] == (blocks + 1) * 128
    assert ctx.ledger.residual_bytes == 0
    assert ctx.state.get(PROFILE).set_by == "language_model"
    assert ctx.ledger.peak_held_bytes <= ctx.ledger.requested_bytes


def test_the_profile_reads_the_most_context_that_a_chunk_can(tmp_path: Path) -> None:
    device = FakeDevice(2000)
    ctx = context(device, tmp_path, *LIMITS)
    engine = ToyEngine(device)
    load(ctx, engine)
    profile(ctx)
    assert engine.calls == ["step 32 after 32"]


def test_text_only_makes_no_dummy_data(tmp_path: Path) -> None:
    device = FakeDevice(2000)
    ctx = context(device, tmp_path, *LIMITS)
    load(ctx, ToyEngine(device))
    assert DummyData(DummyData.Config(use="dummy_data")).run(ctx) == "text only"
    assert ctx.metrics["processor_calls"] == 0
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("others", [0, 20, 55])
def test_neighbours_from_before_do_not_change_the_kv_cache(tmp_path: Path, others: int) -> None:
    device = FakeDevice(round(79.15 * GiB), others_bytes=others * GiB)
    ctx = context(device, tmp_path, "gpu.util=0.2", "kv.bytes=auto", "scheduler.max_num_seqs=1")
    load(ctx, ToyEngine(device, weights=8 * GiB, step_peak=0, kv_spec=KVSpec(1, 1, 1024, "float32", 4)))
    profile(ctx)
    allocate(ctx)
    assert ctx.state.get(KV_CACHE).bytes / GiB == pytest.approx(7.83, abs=0.01)


def test_a_neighbour_that_leaves_while_we_profile_changes_nothing(tmp_path: Path) -> None:
    def leave(device: FakeDevice) -> None:
        device.others_bytes = 0

    blocks = []
    for script in ([], [lambda device: None, lambda device: None, leave]):
        device = FakeDevice(2000, others_bytes=400, script=script)
        ctx = context(device, tmp_path, *LIMITS)
        load(ctx, ToyEngine(device))
        profile(ctx)
        allocate(ctx)
        blocks.append(ctx.state.get(KV_CACHE).num_blocks)
    assert blocks[0] == blocks[1] > 0


def test_a_neighbour_that_comes_shrinks_the_kv_cache_and_it_is_said(tmp_path: Path) -> None:
    device = FakeDevice(1000)
    ctx = context(device, tmp_path, *LIMITS)
    load(ctx, ToyEngine(device, max_model_len=16))
    profile(ctx)
    device.others_bytes = 600
    assert "limited by free" in allocate(ctx)
    assert ctx.state.get(KV_CACHE).num_blocks == (400 - 130) // 128 - 1
    assert ctx.ledger.other_processes_bytes == 600


def test_a_size_in_bytes_needs_no_profile_and_no_fraction(tmp_path: Path) -> None:
    device = FakeDevice(80 * GiB, others_bytes=50 * GiB)
    ctx = context(device, tmp_path, "gpu.util=0.01", "kv.bytes=4GiB", "scheduler.max_num_seqs=1")
    load(ctx, ToyEngine(device, weights=2 * GiB, kv_spec=KVSpec(1, 1, 1024, "float32", 4)))
    stage = AllocateKV(AllocateKV.Config(use="allocate_kv"))
    assert stage.required(ctx.config) == (ENGINE,)
    stage.run(ctx)
    assert ctx.state.get(KV_CACHE).bytes == 4 * GiB
    assert ctx.state.get(KV_CACHE).limited_by == "kv_bytes"


def test_need_is_what_the_limits_take_and_a_padding_block(tmp_path: Path) -> None:
    device = FakeDevice(80 * GiB)
    ctx = context(device, tmp_path, "kv.bytes=need", "scheduler.max_num_seqs=1")
    load(ctx, ToyEngine(device, kv_spec=KVSpec(28, 8, 128, "bfloat16", 2), max_model_len=1024))
    allocate(ctx)
    assert ctx.state.get(KV_CACHE).num_blocks == 64
    assert ctx.state.get(KV_CACHE).bytes == 117_440_512
    assert ctx.ledger.accounts["kv_cache"] == 117_440_512 // 64 * 65


def test_the_bytes_that_a_run_reports_give_the_same_run_again(tmp_path: Path) -> None:
    size = "auto"
    blocks = set()
    for _ in range(3):
        device = FakeDevice(5000)
        ctx = context(device, tmp_path, *LIMITS, f"kv.bytes={size}")
        load(ctx, ToyEngine(device))
        profile(ctx)
        allocate(ctx)
        size = str(ctx.state.get(KV_CACHE).bytes)
        blocks.add(ctx.state.get(KV_CACHE).num_blocks)
    assert len(blocks) == 1


def test_too_few_blocks_for_one_request_names_the_length_that_fits(tmp_path: Path) -> None:
    device = FakeDevice(3000)
    ctx = context(device, tmp_path, *LIMITS)
    load(ctx, ToyEngine(device, max_model_len=128))
    profile(ctx)
    with pytest.raises(BudgetError, match=r"128 tokens takes 2 blocks, and 1 fit; scheduler\.max_model_len=64 or"):
        ctx.config = ctx.config.model_copy(
            update={"kv": ctx.config.kv.model_copy(update={"block_size": 64, "bytes": 64 * 8})}
        )
        allocate(ctx)


def test_graphs_are_charged_what_was_read(tmp_path: Path) -> None:
    device = FakeDevice(2000, supports_graphs=True)
    ctx = context(device, tmp_path, *LIMITS)
    load(ctx, ToyEngine(device, graph_bytes=40))
    GraphCapture(GraphCapture.Config(use="graph_capture")).run(ctx)
    assert ctx.ledger.accounts["cudagraph"] == 40
    assert [graph.size for graph in ctx.state.get(GRAPHS).captured] == [2, 1]


def test_a_fall_during_capture_charges_nothing_and_warns(tmp_path: Path) -> None:
    lines = Lines()
    device = FakeDevice(2000, supports_graphs=True)
    ctx = context(device, tmp_path, *LIMITS, "graphs.mode=estimate", events=lines)
    load(ctx, ToyEngine(device, graph_bytes=-40))
    GraphCapture(GraphCapture.Config(use="graph_capture")).run(ctx)
    assert ctx.ledger.accounts["cudagraph"] == 0
    assert lines.said == ["warning: memory fell by 40 B during capture: charged 0"]


@pytest.mark.parametrize(("graphs", "mode", "why"), [(False, "estimate", "has no graphs"), (True, "none", "eagerly")])
def test_no_graphs_where_there_are_none_or_none_are_wanted(tmp_path: Path, graphs: bool, mode: str, why: str) -> None:
    ctx = context(FakeDevice(1000, supports_graphs=graphs), tmp_path, f"graphs.mode={mode}")
    with pytest.raises(Skipped, match=why):
        GraphCapture(GraphCapture.Config(use="graph_capture")).run(ctx)


def test_capture_sizes() -> None:
    assert capture_sizes("auto", 20) == [20, 16, 8, 4, 2, 1]
    assert capture_sizes("auto", 1) == [1]
    assert capture_sizes([3, 64, 7], 8) == [8, 7, 3]


def test_caches_are_empty_afterwards(tmp_path: Path) -> None:
    ctx = started(tmp_path)
    ClearCaches(ClearCaches.Config(use="clear_caches")).run(ctx)
    assert not ctx.state.has(DUMMY)
    assert "dummy data" in ctx.metrics["checked"]


def test_a_cache_that_will_not_empty_is_named(tmp_path: Path) -> None:
    device = FakeDevice(2000)
    ctx = context(device, tmp_path, *LIMITS)
    load(ctx, ToyEngine(device, planted="held", cached=1))
    with pytest.raises(StillHeldError, match=r"encoder outputs \(1\)"):
        ClearCaches(ClearCaches.Config(use="clear_caches")).run(ctx)


def test_dummy_data_that_somebody_keeps_is_named(tmp_path: Path) -> None:
    device = FakeDevice(2000)
    ctx = context(device, tmp_path, *LIMITS)
    load(ctx, ToyEngine(device))
    kept = DummyBatch({"image": MediaInputs("image", [1], [True], {}, "hash")})
    ctx.state.put(DUMMY, kept)
    with pytest.raises(StillHeldError, match=r"dummy data \(1\)"):
        ClearCaches(ClearCaches.Config(use="clear_caches")).run(ctx)


def test_a_profiler_that_cannot_make_a_modality_is_named(tmp_path: Path) -> None:
    class Seeing(ToyEngine):
        def modalities(self) -> tuple[str, ...]:
            return ("image",)

    class Blind:
        modalities = ()
        items_per_prompt: ClassVar[dict[str, int]] = {}

        def __init__(self, *_: object) -> None:
            return None

    device = FakeDevice(2000)
    ctx = context(device, tmp_path, *LIMITS, "model.profiler=blind")
    load(ctx, Seeing(device))
    ctx.resolver = lambda group, name: Blind
    with pytest.raises(StageError, match=r"'blind' cannot make image; set mm\.limit_per_prompt\.image=0"):
        DummyData(DummyData.Config(use="dummy_data")).run(ctx)


def test_a_healthy_engine_verifies(tmp_path: Path) -> None:
    ctx = started(tmp_path)
    assert verify(ctx).startswith("4 requests, 0 images, 64 tokens, none lost")
    assert ctx.state.get(VERIFIED)
    memory = ctx.metrics["memory"][0]
    assert memory["peak_bytes"] == memory["reserved_bytes"] == 30


@pytest.mark.parametrize(
    ("planted", "caught"),
    [
        ("lost", "verify-0 was lost: 3 of 4 came back"),
        ("error", "verify-0 failed: too long"),
        ("short", "verify-0 has 15 tokens of 16"),
        ("peak", "serving took 31 B above what was held, and 30 B were reserved"),
        ("late", "memory was allocated late"),
        ("wrong", r"verify-3, token 15: log-probability -1\.5000, the oracle's -1\.0000"),
        ("nan", "verify-0, token 0"),
        ("likelier", "its best 3"),
    ],
)
def test_a_planted_fault_is_caught(tmp_path: Path, planted: str, caught: str) -> None:
    ctx = started(tmp_path, planted)
    with pytest.raises(VerificationError, match=caught):
        verify(ctx)
    assert not ctx.state.has(VERIFIED)


def test_what_verify_leaves_behind_is_caught(tmp_path: Path) -> None:
    with pytest.raises(StillHeldError, match="encoder outputs"):
        verify(started(tmp_path, "held"))


def test_a_folder_without_pictures_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    stage = Verify(Verify.Config(use="verify", images=str(tmp_path)))
    ctx = context(FakeDevice(1000), tmp_path)
    with pytest.raises(ConfigError, match=r"stages\.verify\.images=.*give a folder with \.jpg or \.png"):
        stage.check(ctx.config, ctx.resolver)


def test_off_is_off(tmp_path: Path) -> None:
    with pytest.raises(Skipped, match=r"stages\.verify\.mode=off"):
        verify(started(tmp_path), mode="off")


def test_a_process_that_passes_the_ceiling_is_caught(tmp_path: Path) -> None:
    ctx = started(tmp_path)
    device = ctx.device
    assert isinstance(device, FakeDevice)
    device.non_torch_bytes += 800
    with pytest.raises(VerificationError, match=r"held 1\.\d+ KiB, and gpu\.util=0\.5 allows 1000 B"):
        verify(ctx)


def test_what_was_read_and_no_account_explains_is_not_given_to_the_kv_cache(tmp_path: Path) -> None:
    blocks = []
    for unexplained in (0, 128):
        device = FakeDevice(2000)
        ctx = context(device, tmp_path, *LIMITS)
        load(ctx, ToyEngine(device))
        profile(ctx)
        device.non_torch_bytes += unexplained
        allocate(ctx)
        blocks.append(ctx.state.get(KV_CACHE).num_blocks)
        assert ctx.ledger.held_bytes + ctx.ledger.accounts["peak_activation"] <= ctx.ledger.requested_bytes
    assert blocks[0] - blocks[1] == 1


def test_the_rehearsal_decides_what_is_left_for_a_step(tmp_path: Path) -> None:
    device = FakeDevice(2000)
    ctx = context(device, tmp_path, *LIMITS)
    engine = ToyEngine(device)
    load(ctx, engine)
    profile(ctx)
    assert ctx.ledger.accounts["peak_activation"] == 30
    engine.step_peak = 70
    allocate(ctx)
    assert ctx.ledger.accounts["peak_activation"] == 70
