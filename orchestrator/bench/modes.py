"""The ways of starting that are compared."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.cache.folder import FOLDER_VARIABLE
from orchestrator.errors import ConfigError, near_miss

COLD = "-cold"
KINDS = {
    "first": "nothing is kept of an earlier start: the disk cache and the cache of compiled kernels are new",
    "profiled": "caches are filled, and the profile is measured again (startup_plan=off)",
    "second": "what an earlier start learned is taken over (startup_plan=use)",
    "zygote": "as second, forked from an import server",
}
"""What each is; a name with `-cold` at its end finds the weights' files out of the page cache."""


@dataclass(frozen=True)
class Mode:
    """One way of starting."""

    kind: str
    is_cold: bool

    @classmethod
    def of(cls, name: str) -> Mode:
        """
        Raises:
            ConfigError: there is no such mode.
        """
        kind = name.removesuffix(COLD)
        if kind not in KINDS:
            raise ConfigError.of("--modes", near_miss(name, [*KINDS, *(each + COLD for each in KINDS)]), name)
        return cls(kind, kind != name)

    @property
    def name(self) -> str:
        return self.kind + (COLD if self.is_cold else "")

    @property
    def is_forked(self) -> bool:
        return self.kind == "zygote"

    @property
    def is_first(self) -> bool:
        return self.kind == "first"

    def command(self, overrides: Sequence[str], folder: Path) -> list[str]:
        """The command of a start whose record goes to `folder`."""
        module = ["orchestrator.zygote", "run"] if self.is_forked else ["orchestrator"]
        return [sys.executable, "-m", *module, *self.overrides(overrides), f"run.dir={folder}"]

    def overrides(self, given: Sequence[str]) -> list[str]:
        """The user's, and what makes it this mode where the user says nothing about it."""
        kept = [each for each in given if not (self.is_first and each.startswith("cache.dir="))]
        if not self.is_first and not any(each.startswith("startup_plan=") for each in given):
            kept.append(f"startup_plan={'off' if self.kind == 'profiled' else 'use'}")
        return kept

    def environment(self, folder: Path) -> dict[str, str]:
        """Variables that this mode changes; `folder` is a new one."""
        if not self.is_first:
            return {}
        return {FOLDER_VARIABLE: str(folder / "cache"), "TRITON_CACHE_DIR": str(folder / "triton")}
