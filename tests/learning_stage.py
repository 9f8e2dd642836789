"""A stage that asks for dummy data, named on the command line as `tests.learning_stage:Asks`."""

from __future__ import annotations

from orchestrator import DUMMY, Context, Stage, StageConfig


class Asks(Stage[StageConfig]):
    requires = (DUMMY,)

    def run(self, ctx: Context) -> None:
        ctx.metrics["images"] = len(ctx.state.get(DUMMY).items)
