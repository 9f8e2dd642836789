"""The ledger through the real stages over a fake device: neighbours, absurd readings, refusals whose advice works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orchestrator.artifacts import KV_CACHE
from orchestrator.clock import Clock
from orchestrator.device.fake import FakeDevice
from orchestrator.engine.base import KVSpec, Output, Request, WeightsReport
from orchestrator.errors import BudgetError, DeviceOutOfMemoryError
from orchestrator.events import Events
from orchestrator.memory.snapshot import Source
from orchestrator.pipeline import Slot, not_run, run
from orchestrator.records import RunRecord
from orchestrator.stage import Context, Stage
from orchestrator.stages.allocate_kv import AllocateKV
from orchestrator.stages.dummy_data import DummyData
from orchestrator.stages.graph_capture import GraphCapture
from orchestrator.stages.load_weights import LoadWeights
from orchestrator.stages.profile_run import ProfileRun
from orchestrator.stages.verify import Verify
from orchestrator.units import GiB, MiB
from tests.toy import Lines, ToyEngine, context

SPEC = KVSpec(32, 8, 128, "bfloat16", 2)
"""2 MiB a block of 16 tokens."""
FEW = ("scheduler.max_num_seqs=2", "scheduler.max_num_batched_tokens=2048")


def gib(value: float) -> int:
    return round(value * GiB)


@dataclass
class Given:
    """A device and a model in GiB, and what happens while the model is profiled."""

    total: float = 80
    others: float = 0
    weights: float = 15
    context: float = 0
    peak: float = 1
    graphs: float = 0
    max_model_len: int = 4096
    source: Source = "nvml_process"
    meanwhile: Callable[[FakeDevice], None] | None = None

    def engine(self, device: FakeDevice) -> ToyEngine:
        return _Busy(
            device,
            meanwhile=self.meanwhile,
            weights=gib(self.weights),
            step_peak=gib(self.peak),
            graph_bytes=gib(self.graphs),
            kv_spec=SPEC,
            max_model_len=self.max_model_len,
        )


class _Busy(ToyEngine):
    """Something happens on the device while it is profiled."""

    def __init__(self, device: FakeDevice, meanwhile: Callable[[FakeDevice], None] | None, **given: object) -> None:
        super().__init__(device, **given)  # type: ignore[arg-type]
        self._meanwhile = meanwhile

    def dummy_step(self, num_tokens: int, context: int) -> None:
        if self._meanwhile is not None:
            self._meanwhile(self.device)
        super().dummy_step(num_tokens, context)


def begun(
    given: Given, folder: Path, overrides: Sequence[str], lines: Lines | None = None
) -> tuple[Context, ToyEngine]:
    device = FakeDevice(
        gib(given.total),
        others_bytes=gib(given.others),
        context_bytes=gib(given.context),
        supports_graphs=given.graphs != 0,
        source=given.source,
    )
    ctx = context(device, folder, *FEW, *overrides, events=lines or Lines())
    engine = given.engine(device)
    ctx.resolver = lambda group, name: lambda *_: engine
    return ctx, engine


def pipeline_of(given: Given) -> list[Slot]:
    stages: list[Stage[Any]] = [
        LoadWeights(LoadWeights.Config(use="load_weights")),
        DummyData(DummyData.Config(use="dummy_data")),
        ProfileRun(ProfileRun.Config(use="profile_run")),
        *([GraphCapture(GraphCapture.Config(use="graph_capture"))] if given.graphs else []),
        AllocateKV(AllocateKV.Config(use="allocate_kv")),
        Verify(Verify.Config(use="verify")),
    ]
    return [Slot(stage.config.use, stage.config.use, "built-in", stage) for stage in stages]


def started(
    given: Given, folder: Path, *overrides: str, lines: Lines | None = None
) -> tuple[Context, RunRecord, BaseException | None]:
    """A whole start through the pipeline; what stopped it, if anything did."""
    ctx, _ = begun(given, folder, overrides, lines)
    record = RunRecord(run_id="x", started_at="now", stages=not_run(slots := pipeline_of(given)))
    ctx.clock = Clock.from_now()
    return ctx, record, run(slots, ctx, record)


def kv_gib(given: Given, folder: Path, *overrides: str) -> float:
    """The KV cache of a start that must succeed, its padding block included."""
    ctx, _, stopped_by = started(given, folder, "kv.bytes=auto", *overrides)
    assert stopped_by is None, stopped_by
    assert ctx.ledger.residual_bytes == 0
    assert ctx.ledger.peak_held_bytes <= ctx.ledger.requested_bytes
    return ctx.ledger.accounts["kv_cache"] / GiB


@pytest.mark.parametrize(
    ("weights", "outside", "peak", "kv"),
    [(14.96, 1.79, 1.26, 53.28), (7.48, 3.58, 1.26, 58.97), (19.86, 0.16, 36.63, 14.64)],
)
def test_what_is_left_of_a_card(tmp_path: Path, weights: float, outside: float, peak: float, kv: float) -> None:
    given = Given(total=79.22, weights=weights, context=outside, peak=peak)
    assert kv_gib(given, tmp_path, "gpu.util=0.9") == pytest.approx(kv, abs=0.02)


@pytest.mark.parametrize("others", [0, 20, 55, 63.3])
def test_neighbours_from_before_change_nothing(tmp_path: Path, others: float) -> None:
    given = Given(total=79.15, others=others, weights=7, peak=1)
    assert kv_gib(given, tmp_path, "gpu.util=0.2") == pytest.approx(7.83, abs=0.01)


@pytest.mark.parametrize("before", [0.0, 7.23, 30.0])
@pytest.mark.parametrize("after", [0.0, 7.23, 11.0])
def test_neighbours_that_come_and_go_while_we_measure_change_nothing_and_are_told(
    tmp_path: Path, before: float, after: float
) -> None:
    def change(device: FakeDevice) -> None:
        device.others_bytes = gib(after)

    lines = Lines()
    given = Given(total=90.17, others=before, meanwhile=change)
    ctx, _, stopped_by = started(given, tmp_path, "kv.bytes=auto", "gpu.util=0.5", lines=lines)
    assert stopped_by is None
    assert ctx.ledger.accounts["kv_cache"] / GiB == pytest.approx(90.17 / 2 - 16, abs=0.01)
    did = "took" if after > before else "gave back"
    told = [f"other processes {did} {abs(after - before):.2f} GiB while this start measured: not charged to it"]
    assert [line for line in lines.said if line.startswith("other")] == (told if before != after else [])


@pytest.mark.parametrize("left", [7.23, 20.0, 60.0])
def test_a_neighbour_that_leaves_makes_nothing_negative_where_the_whole_device_is_read(
    tmp_path: Path, left: float
) -> None:
    def leave(device: FakeDevice) -> None:
        device.others_bytes = 0

    given = Given(total=100, others=left, context=0.5, source="device_delta", meanwhile=leave)
    ctx, _, stopped_by = started(given, tmp_path, "kv.bytes=auto", "gpu.util=0.3")
    assert stopped_by is None
    assert min(ctx.ledger.accounts.values()) >= 0
    assert ctx.ledger.accounts["kv_cache"] / GiB == pytest.approx(30 - 16.5, abs=0.01)


@pytest.mark.parametrize(("total", "util", "fell", "kv"), [(50, 0.8, -10.33, 21.76), (90.35, 0.98, -20.5, 70.1)])
def test_a_fall_during_capture_is_no_gain(tmp_path: Path, total: float, util: float, fell: float, kv: float) -> None:
    lines = Lines()
    given = Given(total=total, weights=15, peak=total * util - 15 - kv, graphs=fell)
    overrides = ("kv.bytes=auto", f"gpu.util={util}", "graphs.mode=estimate")
    ctx, record, _ = started(given, tmp_path, *overrides, lines=lines)
    assert ctx.ledger.accounts["cudagraph"] == 0
    assert [line for line in lines.said if line.startswith("warning: memory fell by")]
    assert record.kv_cache is not None
    assert record.kv_cache.bytes / GiB == pytest.approx(kv, abs=0.01)


@pytest.mark.parametrize("util", ["0.01", "0.5"])
def test_a_size_wins_over_the_share(tmp_path: Path, util: str) -> None:
    given = Given(total=80, others=50, weights=2)
    _, record, stopped_by = started(given, tmp_path, "kv.bytes=4GiB", f"gpu.util={util}")
    assert stopped_by is None
    assert record.kv_cache is not None
    assert (record.kv_cache.bytes, record.kv_cache.limited_by) == (4 * GiB, "kv_bytes")


def test_a_size_that_is_not_free_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    given = Given(total=80, others=60, weights=15, context=0.5)
    ctx, record, refused = started(given, tmp_path, "kv.bytes=6GiB")
    assert isinstance(refused, BudgetError)
    assert record.stages[0].error is not None
    assert ctx.device.snapshot().allocated_bytes == 0
    assert refused.suggestions == {"kv.bytes": str(gib(4.5) - 2 * MiB)}
    assert "could work" in str(refused)


WEIGHTS = [0.5, 15.0]
LENGTHS = [64, 131_072]


@pytest.mark.parametrize("others", [0.0, 41.3])
@pytest.mark.parametrize("peak", [0.0, 2.3, 19.0])
@pytest.mark.parametrize(
    "asked", ["gpu.util=0.01", "gpu.util=0.19", "kv.bytes=1MiB", "kv.bytes=79GiB", "kv.bytes=need"]
)
def test_whatever_a_refusal_suggests_starts(tmp_path: Path, asked: str, peak: float, others: float) -> None:
    for weights in WEIGHTS:
        for length in LENGTHS:
            given = Given(others=others, weights=weights, peak=peak, max_model_len=length, context=0.6)
            overrides = [asked] if asked.startswith("kv") else ["kv.bytes=auto", asked]
            follow(given, tmp_path, overrides)


def follow(given: Given, folder: Path, overrides: list[str], depth: int = 0) -> None:
    """Give each suggestion back, alone. A refusal from before the profile may be followed by one from after it, or by a
    profile that passes the ceiling."""
    _, record, stopped_by = started(given, folder, *overrides)
    if stopped_by is None or record.stages[2].status == "failed":
        return
    assert isinstance(stopped_by, BudgetError), stopped_by
    assert depth < 2, (given, overrides, str(stopped_by))
    after_profile = "could work" not in str(stopped_by)
    for field, value in stopped_by.suggestions.items():
        again = [each for each in overrides if not each.startswith(field)]
        changed = given
        if field == "scheduler.max_model_len":
            changed = Given(**(vars(given) | {"max_model_len": int(value)}))
        elif field == "kv.bytes":
            again = [each for each in again if not each.startswith("kv.bytes")]
        if field != "scheduler.max_model_len":
            again.append(f"{field}={value}")
        if after_profile:
            _, _, stopped_again = started(changed, folder, *again)
            assert stopped_again is None, (given, overrides, str(stopped_by), str(stopped_again))
        else:
            follow(changed, folder, again, depth + 1)


def test_a_refusal_after_the_profile_names_each_knob_and_what_was_measured(tmp_path: Path) -> None:
    given = Given(weights=15, context=0.6, peak=19, max_model_len=8192)
    _, _, refused = started(given, tmp_path, "kv.bytes=auto", "gpu.util=0.44")
    assert isinstance(refused, BudgetError)
    assert list(refused.suggestions) == ["gpu.util", "scheduler.max_model_len", "kv.bytes"]
    assert refused.suggestions["gpu.util"] == "0.45"
    assert "with 15.60 GiB held and a peak of 19.00 GiB set by language_model 35.60 GiB are wanted" in str(refused)
    assert refused.exit_code == 2


@pytest.mark.parametrize("size", ["auto", "need", "4GiB"])
def test_a_refusal_that_nothing_would_help_says_so(tmp_path: Path, size: str) -> None:
    _, _, refused = started(Given(total=8), tmp_path, f"kv.bytes={size}", "gpu.util=0.5")
    assert isinstance(refused, BudgetError)
    assert str(refused).endswith("; no setting of the budget makes it fit")


def test_the_bytes_that_a_run_reports_give_the_same_run_for_three_rounds(tmp_path: Path) -> None:
    size, seen = "auto", set()
    for _ in range(4):
        _, record, stopped_by = started(Given(), tmp_path, f"kv.bytes={size}", "gpu.util=0.7")
        assert stopped_by is None
        assert record.kv_cache is not None
        size = str(record.kv_cache.bytes)
        seen.add(record.kv_cache.num_gpu_blocks)
    assert len(seen) == 1


def test_a_profile_that_would_pass_the_ceiling_fails_and_says_what_would_help(tmp_path: Path) -> None:
    given = Given(weights=15, peak=30)
    ctx, record, stopped_by = started(given, tmp_path, "kv.bytes=auto", "gpu.util=0.5")
    assert isinstance(stopped_by, DeviceOutOfMemoryError)
    assert ctx.ledger.peak_held_bytes <= ctx.ledger.requested_bytes
    error = record.stages[2].error
    assert error is not None
    assert error.type == "DeviceOutOfMemoryError"
    assert error.traceback is None
    for part in (
        "stages.profile_run: out of memory",
        "may hold 40.00 GiB (gpu.util=0.5), charged so far: weights 15.00 GiB",
        "65.00 GiB of 80.00 are free",
        "would help: a greater gpu.util, a smaller scheduler.max_num_batched_tokens",
    ):
        assert part in error.message
    assert [stage.status for stage in record.stages] == ["ok", "ok", "failed", "not_run", "not_run"]


def test_each_stages_peak_has_a_part(tmp_path: Path) -> None:
    _, record, stopped_by = started(Given(weights=3, peak=2), tmp_path, "kv.bytes=auto", "gpu.util=0.5")
    assert stopped_by is None
    peaks = {stage.slot: (stage.memory.peak_part, stage.memory.peak_bytes) for stage in record.stages}
    assert peaks["load_weights"] == ("load_weights", 3 * GiB)
    assert peaks["profile_run"] == ("language_model", 2 * GiB)
    assert peaks["verify"] == ("verify", 2 * GiB)


class _Overflow(ToyEngine):
    """The library's own way to say that memory is out."""

    def load(self, events: Events, admit: Callable[[int], None] | None = None) -> WeightsReport:
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported at some other API call")


def test_a_librarys_out_of_memory_is_told_in_the_same_words(tmp_path: Path) -> None:
    device = FakeDevice(GiB)
    ctx = context(device, tmp_path, "kv.bytes=auto")
    ctx.resolver = lambda group, name: lambda *_: _Overflow(device)
    slots = pipeline_of(Given())[:1]
    record = RunRecord(run_id="x", started_at="now", stages=not_run(slots))
    stopped_by = run(slots, ctx, record)
    assert isinstance(stopped_by, DeviceOutOfMemoryError)
    assert "stages.load_weights: out of memory (CUDA error: out of memory); the start may hold" in str(stopped_by)
    assert "nothing yet" in str(stopped_by)
    assert stopped_by.exit_code == 1


class _Crowded(_Busy):
    """Somebody takes what is free just before the KV cache gets memory, or just before requests are served."""

    before = ""

    def allocate_kv(self, num_blocks: int) -> int:
        self._crowd("allocate_kv")
        return super().allocate_kv(num_blocks)

    def generate(self, requests: Sequence[Request]) -> list[Output]:
        self._crowd("verify")
        return super().generate(requests)

    def _crowd(self, slot: str) -> None:
        if slot == self.before:
            self.device.others_bytes += self.device.snapshot().free_bytes


@pytest.mark.parametrize("size", ["auto", "4GiB"])
@pytest.mark.parametrize("slot", ["allocate_kv", "verify"])
def test_memory_that_runs_out_late_is_told_with_what_would_help(tmp_path: Path, slot: str, size: str) -> None:
    given = Given(weights=2)
    device = FakeDevice(gib(given.total))
    ctx = context(device, tmp_path, *FEW, f"kv.bytes={size}", "gpu.util=0.5")
    engine = _Crowded(device, None, weights=gib(2), kv_spec=SPEC)
    engine.before = slot
    ctx.resolver = lambda group, name: lambda *_: engine
    record = RunRecord(run_id="x", started_at="now", stages=not_run(slots := pipeline_of(given)))
    stopped_by = run(slots, ctx, record)
    assert str(stopped_by).startswith(f"stages.{slot}: out of memory (")
    assert str(stopped_by).endswith("GiB of 80.00 are free; would help: a smaller KV cache by a size in kv.bytes")
    assert ("gpu.util" in str(stopped_by)) is (size == "auto")


@pytest.mark.parametrize("last", ["profile_run", "graph_capture"])
def test_a_pipeline_that_ends_early_ends_with_a_reading_too(tmp_path: Path, last: str) -> None:
    given = Given(weights=2, context=0.5, graphs=0.25)
    ctx, _ = begun(given, tmp_path, ("kv.bytes=auto", "gpu.util=0.5", "graphs.mode=estimate"))
    slots = pipeline_of(given)
    slots = slots[: [slot.name for slot in slots].index(last) + 1]
    assert run(slots, ctx, RunRecord(run_id="x", started_at="now", stages=not_run(slots))) is None
    ledger, reading = ctx.ledger, ctx.device.snapshot()
    assert ledger.accounted_bytes + ledger.residual_bytes == ledger.held_bytes == reading.ours_bytes > 0
    assert ledger.residual_bytes == 0


@pytest.mark.parametrize("share", [0.25, 0.3])
def test_engines_of_one_process_have_budgets_of_their_own(tmp_path: Path, share: float) -> None:
    device = FakeDevice(80 * GiB, context_bytes=GiB // 2)
    given = Given(weights=0.25, peak=0.5, max_model_len=2048)
    caches = []
    for _ in range(3):
        ctx = context(device, tmp_path, *FEW, "kv.bytes=auto", f"gpu.util={share}")
        engine = given.engine(device)
        ctx.resolver = lambda group, name, engine=engine: lambda *_: engine  # type: ignore[misc]
        slots = pipeline_of(given)
        record = RunRecord(run_id="x", started_at="now", stages=not_run(slots))
        assert run(slots, ctx, record) is None
        assert min(ctx.ledger.accounts.values()) >= 0
        assert ctx.ledger.accounts["non_torch"] == 0
        caches.append(ctx.state.get(KV_CACHE).bytes)
    assert caches[1] == caches[2]
    assert 0 <= caches[1] - caches[0] <= GiB // 2 + 2 * MiB
    device.free(caches[0] + gib(0.25))
    assert context(device, tmp_path, "kv.bytes=auto", f"gpu.util={share}").ledger.accounts["context"] == 0


@pytest.mark.parametrize(("util", "starts"), [(0.2, False), (0.21, True)])
def test_weights_that_do_not_fit_beside_what_libraries_take_are_refused_before_they_are_read(
    tmp_path: Path, util: float, starts: bool
) -> None:
    given = Given(weights=15.5, peak=0.1, max_model_len=64)
    device = FakeDevice(80 * GiB)
    device.library_bytes = GiB
    ctx = context(device, tmp_path, *FEW, "kv.bytes=auto", f"gpu.util={util}")
    engine = given.engine(device)
    ctx.resolver = lambda group, name: lambda *_: engine
    record = RunRecord(run_id="x", started_at="now", stages=not_run(slots := pipeline_of(given)))
    refused = run(slots, ctx, record)
    if starts:
        assert refused is None
        return
    assert isinstance(refused, BudgetError), refused
    assert device.peak_bytes == 0
    assert "16.50 GiB are wanted, and gpu.util=0.2 allows 16.00 GiB; gpu.util=0.21 or kv.bytes=" in str(refused)


def test_what_leaves_no_room_is_refused_before_graphs_are_captured(tmp_path: Path) -> None:
    given = Given(weights=15, peak=5, graphs=1, max_model_len=65_536)
    _, record, refused = started(given, tmp_path, "kv.bytes=auto", "gpu.util=0.33", "graphs.mode=estimate")
    assert isinstance(refused, BudgetError)
    assert record.stages[3].slot == "graph_capture"
    assert record.stages[3].status == "failed"
    assert "with 15.00 GiB held and a peak of 5.00 GiB set by language_model 28.00 GiB are wanted" in str(refused)
