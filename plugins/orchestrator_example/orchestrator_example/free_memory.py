"""A stage that reports free memory, and fails if that is too little."""

from __future__ import annotations

from pydantic import Field

from orchestrator import Context, Stage, StageConfig, StageError


class FreeMemoryConfig(StageConfig):
    at_least_bytes: int = Field(default=0, ge=0)
    """Fail if less than this is free."""


class FreeMemory(Stage[FreeMemoryConfig]):
    """Reports what is still free on the device."""

    Config = FreeMemoryConfig

    def run(self, ctx: Context) -> str:
        free = ctx.device.snapshot().free_bytes
        ctx.metrics["free_bytes"] = free
        if free < self.config.at_least_bytes:
            raise StageError(f"{free} bytes are free, fewer than at_least_bytes={self.config.at_least_bytes}")
        return f"{free / 2**30:.2f} GiB are free"
