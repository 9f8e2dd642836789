"""A toy engine that remembers its steps, and whole starts with it on a fake device; for the tests of start-up plans."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from orchestrator import ItemSpec, ModalityProfiler, pipeline
from orchestrator.artifacts import KV_CACHE
from orchestrator.cache import Cache, Entry
from orchestrator.device.base import DeviceInfo
from orchestrator.device.fake import FakeDevice
from orchestrator.engine.base import CapturedGraph
from orchestrator.engine.remembering import Around
from orchestrator.errors import DeviceOutOfMemoryError
from orchestrator.memory.snapshot import Source
from orchestrator.modality.base import DummyBatch
from orchestrator.records import RunRecord, StageRecord
from orchestrator.registry import Registry
from orchestrator.stage import Context
from orchestrator.startup_plan.learned import Learned
from orchestrator.units import GiB, MiB
from tests.toy import Lines, ToyEngine, context

LIMITS = (
    "scheduler.max_num_seqs=2",
    "scheduler.max_num_batched_tokens=32",
    "kv.bytes=auto",
    "gpu.util=0.5",
    "graphs.sizes=[1,2]",
)


class Squares(ModalityProfiler):
    """Every image has five tokens, as the toy's processor makes them."""

    modalities: ClassVar[tuple[str, ...]] = ("image",)

    def tokens(self, modality: str, shape: tuple[int, ...]) -> int:
        return 5

    def costliest(self, modality: str) -> ItemSpec:
        return ItemSpec(modality, (4, 4), 5)

    def build(self, spec: ItemSpec) -> Any:
        return None


class Card(FakeDevice):
    """A fake with a name and a driver."""

    def __init__(self, name: str = "card", driver: str = "1", source: Source = "nvml_process") -> None:
        super().__init__(8 * GiB, context_bytes=100 * MiB, supports_graphs=source != "rss", source=source)
        self._info = DeviceInfo("fake", name, self.total_bytes, driver, "9.0")

    def info(self) -> DeviceInfo:
        return self._info


@dataclass
class Learning(ToyEngine):
    """Takes megabytes; its first step loads libraries and leaves a workspace, its first graph more of the former."""

    weights: int = 256 * MiB
    step_peak: int = 400 * MiB
    encoder_peak: int = 200 * MiB
    graph_bytes: int = 64 * MiB
    model_config: Any = field(default_factory=lambda: SimpleNamespace(model_type="squares"))
    plan_identity: dict[str, Any] = field(default_factory=lambda: {"checkpoint": "a", "attention": "toy"})
    items_in_a_call: int = 99
    """More at once are refused as an allocator would."""
    ran: dict[str, int] = field(default_factory=dict)
    made: list[str] = field(default_factory=list)
    _warm: bool = False
    _in_a_call: int = 1

    def modalities(self) -> tuple[str, ...]:
        return ("image",)

    def media_inputs(self, media: Any) -> Any:
        self.made.append(media.modality)
        return super().media_inputs(media)

    def set_micro_batch(self, items: Any, most_tokens: Any = None) -> None:
        self._in_a_call = items.get("image", 1)

    def encode_dummy(self, batch: DummyBatch, items: dict[str, int]) -> None:
        if self._in_a_call > self.items_in_a_call:
            raise DeviceOutOfMemoryError(f"no room for {self._in_a_call} items")
        self.cached += sum(items.values())
        self.calls.append(f"encode {sum(items.values())}")
        self.ran["encoder.image"] = sum(items.values())
        self._use(self.encoder_peak * min(self._in_a_call, sum(items.values())))

    def dummy_step(self, num_tokens: int, context: int) -> None:
        self.ran["language_model"] = num_tokens
        self.calls.append(f"step {num_tokens}")
        self._use(self.step_peak * num_tokens // 32)

    def dummy_logits(self, num_rows: int) -> None:
        self.ran["logits"] = num_rows
        self._use(num_rows * MiB)

    def repeat_worst_step(self) -> None:
        self.repeat_parts(lambda part: nullcontext())

    def repeat_parts(self, around: Around) -> None:
        for part in list(self.ran):
            with around(part):
                self._repeat_part(part)

    def remembered_step(self) -> Entry:
        return Entry({}, {"parts": dict(self.ran)})

    def adopt_step(self, step: Entry) -> None:
        if not isinstance(step.meta.get("parts"), dict):
            raise ValueError("no parts")
        self.ran = dict(step.meta["parts"])

    @property
    def keeps_graphs(self) -> bool:
        return True

    def capture(self, sizes: Sequence[int]) -> list[CapturedGraph]:
        self._use(0)
        return super().capture(sizes)

    def _repeat_part(self, part: str) -> None:
        self.calls.append(f"repeat {part}")
        sizes = {
            "encoder.image": self.encoder_peak * min(self._in_a_call, self.ran[part]),
            "language_model": self.step_peak * self.ran[part] // 32,
            "logits": self.ran[part] * MiB,
        }
        self._use(sizes[part])

    def _use(self, size: int) -> None:
        if not self._warm:
            self._warm = True
            self.device.non_torch_bytes += 80 * MiB
            self.device.allocate(32 * MiB)
        self.device.use(size)


@dataclass
class Run:
    """A start, and what it left."""

    record: RunRecord
    ctx: Context
    engine: Learning
    said: list[str]

    @property
    def blocks(self) -> int:
        return self.ctx.state.get(KV_CACHE).num_blocks

    def stage(self, slot: str) -> StageRecord:
        return next(stage for stage in self.record.stages if stage.slot == slot)

    def plan(self, slot: str = "allocate_kv") -> dict[str, Any]:
        found: dict[str, Any] = self.stage(slot).metrics["startup_plan"]
        return found

    @property
    def profiled(self) -> bool:
        return "step 32" in self.engine.calls


def prepared(
    folder: Path, *overrides: str, engine: Learning | None = None, device: Card | None = None
) -> tuple[Context, Learning, Lines]:
    """A context in which stages find the toy engine, and otherwise what every start finds."""
    device = device or Card()
    engine = engine or Learning(device)
    engine.device = device
    lines, registry = Lines(), Registry.discover()
    ctx = context(device, folder, *LIMITS, *overrides, events=lines)
    ctx.cache = Cache(folder / "cache", max_bytes=64 * MiB, warn=lines.warning)

    def resolve(group: str, name: str) -> Any:
        own = {("engines", "transformers"): lambda *_: engine, ("profilers", "squares"): Squares}
        return own[group, name] if (group, name) in own else registry.resolve(group, name)

    ctx.resolver = resolve
    return ctx, engine, lines


def run(
    folder: Path, *overrides: str, engine: Learning | None = None, device: Card | None = None, run_id: str = "first"
) -> Run:
    """All stages of a start, which is to succeed."""
    ctx, engine, lines = prepared(folder, *overrides, engine=engine, device=device)
    ctx.run_id = run_id
    registry = Registry.discover()
    slots = pipeline.build(ctx.config.stages, registry)
    record = RunRecord(run_id=run_id, started_at="", overrides=[], config={})
    record.stages = pipeline.not_run(slots)
    stopped_by = pipeline.run(slots, ctx, record)
    assert stopped_by is None, stopped_by
    return Run(record, ctx, engine, lines.said)


def plan_key(ctx: Context) -> str:
    """The key of the only plan in the cache."""
    keys = ctx.cache.keys()
    (found,) = [each for each in keys if "facts" in _entry(ctx, each).meta]
    return found


def stored(ctx: Context) -> Learned:
    return Learned.of(_entry(ctx, plan_key(ctx)))


def _entry(ctx: Context, key: str) -> Entry:
    entry = ctx.cache.get(key)
    assert entry is not None
    return entry
