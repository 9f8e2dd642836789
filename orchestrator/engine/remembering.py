"""What an engine must be able to do for a later start to take over what this one learned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from orchestrator.cache import Entry

Around = Callable[[str], AbstractContextManager[None]]
"""The name of a part of a step -> what is entered while that part runs."""


@runtime_checkable
class RemembersSteps(Protocol):
    """An engine without these starts as well; it profiles every time."""

    @property
    def plan_identity(self) -> Mapping[str, Any]:
        """JSON: what decides the memory of a step and is not in the configuration: checkpoint, classes, element types;
        `attention` is the name of the backend that was chosen."""

    def remembered_step(self) -> Entry:
        """What `repeat_worst_step` runs, as shapes; without pixels or samples."""

    def adopt_step(self, step: Entry) -> None:
        """Let `repeat_worst_step` run what another start's `remembered_step` gave.

        Raises:
            ValueError: it is not such a step.
        """

    def repeat_parts(self, around: Around) -> None:
        """As `Engine.repeat_worst_step`, with something entered around each part: `encoder.` and the modality,
        `encoder.mixed`, `language_model`, `logits`."""
