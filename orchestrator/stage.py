"""What a stage is, and what it is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from orchestrator.beside import Beside
from orchestrator.cache import Cache
from orchestrator.clock import Clock
from orchestrator.config import Config as RootConfig
from orchestrator.device.base import Device
from orchestrator.errors import StageError
from orchestrator.events import Events
from orchestrator.memory.ledger import Ledger
from orchestrator.records import Span
from orchestrator.state import Key, State
from orchestrator.tracking import FinishedRun


class StageConfig(BaseModel):
    """Options of a stage. A stage's own `Config` derives from this; every option has its default in the stage's YAML
    too, and a test holds the two together."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    use: str
    """The stage's name in the registry, or `module:Class`."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Seconds after which the stage is taken for hung and fails; null never does."""


C = TypeVar("C", bound=StageConfig)


Resolver = Callable[[str, str], Any]
"""Plugin group and name -> what the name means there; raises UnknownNameError."""


class Skipped(Exception):
    """Raised by a stage that has nothing to do here; the reason goes into the record."""


@dataclass
class Context:
    """What a stage works with. `metrics` and `spans` are this stage's own and go into its record; `cleanup` is unwound
    when the start fails or its engine is closed."""

    config: RootConfig
    device: Device
    cache: Cache
    state: State
    ledger: Ledger
    events: Events
    clock: Clock
    run_dir: Path
    resolver: Resolver
    run_id: str = ""
    """The record's; empty where there is no record."""
    cleanup: ExitStack = field(default_factory=ExitStack)
    metrics: dict[str, Any] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    open_spans: list[str] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)
    """Parts of this stage that measured their own peak: live tensors above where the part began, in bytes."""
    abandon: Callable[[StageError], None] | None = None
    """What is left to do about a stage that hangs; None: nothing."""
    beside: Beside | None = None
    """Where work runs beside the stages; None: nothing runs beside them."""
    is_beside: bool = False

    def apart(self) -> Context:
        """For work beside other stages: its own metrics and spans, and a clock that does not wait for the device, which
        the work must not use."""
        return replace(self, metrics={}, spans=[], open_spans=[], peaks={}, is_beside=True)

    def resolve(self, group: str, name: str) -> Any:
        """The class or function that `name` means in a plugin group (`engines`, `profilers`, `loaders`, ...).

        Raises:
            UnknownNameError: no plugin has it.
        """
        return self.resolver(group, name)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a part of the stage. Waits for the device before it reads the clock, unless it runs beside others."""
        start = self.clock.now()
        self.open_spans.append(name)
        try:
            yield
        finally:
            if not self.is_beside:
                self.device.synchronize()
            self.open_spans.pop()
            self.spans.append(Span(name=name, start_s=start, wall_s=self.clock.now() - start))


class Stage(ABC, Generic[C]):
    """One step of a start.

    Attributes:
        Config: the pydantic model of its options.
        requires: artifacts that earlier stages must provide.
        provides: artifacts that it leaves in the state.
        memory_knobs: settings that make it take less device memory, named when it runs out.
    """

    Config: ClassVar[type[StageConfig]] = StageConfig
    requires: ClassVar[tuple[Key[Any], ...]] = ()
    provides: ClassVar[tuple[Key[Any], ...]] = ()
    memory_knobs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: C) -> None:
        self.config = config

    def required(self, config: RootConfig) -> tuple[Key[Any], ...]:
        """What must have been provided under this configuration; `requires` unless a stage knows better."""
        return self.requires

    def check(self, config: RootConfig, resolve: Resolver) -> None:
        """Refuse what cannot work, from the configuration and from small files alone; runs before anything is loaded.

        Raises:
            UserError: with the field, the value given and what would work.
        """
        return

    def begin(self, config: RootConfig, resolve: Resolver, beside: Beside) -> None:
        """Leave work that is to run beside earlier stages; called before modules are imported, once the configuration
        is known to be right. `run` waits for it, and does without where it was not begun."""
        return

    def concluded(self, run: FinishedRun, resolve: Resolver) -> str | None:
        """Called once the record is written, however the run ended and whether this stage ran or not; the returned text
        is shown. What it raises is a warning: the start is what it was."""
        return None

    @abstractmethod
    def run(self, ctx: Context) -> str | None:
        """Do the work; the returned text, if any, ends the stage's line on the screen."""
