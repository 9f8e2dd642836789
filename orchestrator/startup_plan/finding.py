"""The plan of this start: whether there is one, why not, what became of it, and keeping what was learned instead."""

from __future__ import annotations

import sqlite3
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from orchestrator.artifacts import ENGINE, GRAPHS, KV_CACHE
from orchestrator.cache import fingerprint
from orchestrator.engine.base import Engine
from orchestrator.engine.remembering import RemembersSteps
from orchestrator.stage import Context
from orchestrator.startup_plan.deviation import differs
from orchestrator.startup_plan.fingerprint import parts
from orchestrator.startup_plan.learned import Facts, Graph, Learned, Measured
from orchestrator.startup_plan.why import FIRST, digests, why_missing
from orchestrator.state import Key
from orchestrator.units import format_size

Status = Literal["off", "hit", "miss", "refreshed", "drifted"]


@dataclass
class StartupPlan:
    """
    Attributes:
        status: `hit`: taken over; `miss`: there was none; `refreshed`: learned anew because that was asked for;
            `drifted`: taken over and found wrong; `off`: neither looked for nor kept.
        why: of `off` and `drifted`, and of a miss that is not simply one.
        key: of the entry in the cache.
        learned: what is taken over; None but for a hit.
        measured: what this start measured itself.
    """

    status: Status
    why: str = ""
    key: str = ""
    learned: Learned | None = None
    measured: Measured | None = None
    digests: dict[str, str] = field(default_factory=dict)
    """See `Facts`."""
    checked: bool = False
    """Whether this start ran the step that shows if the plan still holds."""

    def note(self, ctx: Context) -> None:
        """Into the record of the stage that runs."""
        said: dict[str, Any] = {"status": self.status}
        if self.why:
            said["why"] = self.why
        if self.learned is not None:
            said |= {"age_s": round(self.age_s, 1), "run_id": self.learned.facts.run_id}
        ctx.metrics["startup_plan"] = said

    def say(self, ctx: Context) -> None:
        """To the person who waits: that a plan could have been there, and why it is not."""
        if self.status == "miss" and self.why and self.why != FIRST:
            ctx.events.info(f"no start-up plan: {self.why}")

    @property
    def age_s(self) -> float:
        return max(0.0, time.time() - self.learned.facts.learned_at) if self.learned is not None else 0.0

    @property
    def origin(self) -> str:
        """For the line of a stage: when and by which run it was learned."""
        assert self.learned is not None
        return f"learned {_ago(self.age_s)} ago by {self.learned.facts.run_id}"

    def drifted(self, ctx: Context, why: str) -> None:
        """It does not hold: said, and removed, so that no other start takes it over."""
        ctx.events.warning(f"the start-up plan of {self.origin.removeprefix('learned ')} does not hold: {why}")
        ctx.cache.delete(self.key)
        self.status, self.why, self.learned = "drifted", why, None

    def compare_graphs(self, ctx: Context) -> None:
        """Of a plan that holds: note graphs that took another size than it says. Nothing was decided by that."""
        learned, now = self.learned, ctx.ledger.accounts["cudagraph"]
        if learned is not None and differs(learned.facts.graph_bytes, now, ctx.device.memory_slack_bytes):
            why = f"graphs take {format_size(now)}, and {format_size(learned.facts.graph_bytes)} were expected"
            self.measured = learned.facts.measured
            self.drifted(ctx, why)

    def keep(self, ctx: Context) -> None:
        """Keep what this start measured, in place of what there was. Nothing to keep after a hit."""
        engine, measured = ctx.state.get(ENGINE), self.measured
        if measured is None or not self.key or not isinstance(engine, RemembersSteps):
            return
        if measured.refused:
            ctx.events.info("no start-up plan is kept: a lack of memory ended the search for the encoder's micro-batch")
            return
        graphs = ctx.state.get(GRAPHS).captured if ctx.state.has(GRAPHS) else []
        facts = Facts(
            run_id=ctx.run_id,
            learned_at=time.time(),
            measured=measured,
            graphs=[Graph(size=graph.size, bytes=graph.bytes) for graph in graphs],
            graph_bytes=ctx.ledger.accounts["cudagraph"],
            kernels=str(engine.plan_identity.get("attention", "")),
            digests=self.digests,
        )
        ctx.cache.put(self.key, Learned(facts, engine.remembered_step()).entry(_about(ctx, engine)))


STARTUP_PLAN: Key[StartupPlan] = Key("startup_plan", StartupPlan)


def startup_plan(ctx: Context, engine: Engine | None = None) -> StartupPlan:
    """This start's plan, looked for when it is first asked for.

    Args:
        engine: whose; None for the one in the state.
    """
    if not ctx.state.has(STARTUP_PLAN):
        ctx.state.put(STARTUP_PLAN, _found(ctx, engine or ctx.state.get(ENGINE)))
    return ctx.state.get(STARTUP_PLAN)


def _found(ctx: Context, engine: Engine) -> StartupPlan:
    refusal = _refusal(ctx, engine)
    if refusal is not None or not isinstance(engine, RemembersSteps):
        return StartupPlan("off", refusal or "")
    known = parts(ctx, engine, engine)
    key, now = fingerprint(known), digests(known)
    if ctx.config.startup_plan == "refresh":
        return StartupPlan("refreshed", "startup_plan=refresh", key, digests=now)
    entry = ctx.cache.get(key)
    if entry is None:
        why = ""
        # What cannot be read is said where the plan is written.
        with suppress(sqlite3.Error, OSError):
            why = why_missing(ctx.cache.folder, _about(ctx, engine), now)
        return StartupPlan("miss", why, key, digests=now)
    try:
        return StartupPlan("hit", key=key, learned=Learned.of(entry), digests=now)
    except ValueError as error:
        return StartupPlan("miss", f"what is kept cannot be used: {error}", key, digests=now)


def _about(ctx: Context, engine: Engine) -> dict[str, str]:
    """For a person who looks at the cache."""
    model_type = str(engine.model_config.model_type)
    return {"kind": "startup plan", "model_type": model_type, "on": ctx.device.info().name}


def _refusal(ctx: Context, engine: Engine) -> str | None:
    """Why no plan is looked for; None if one is."""
    if ctx.config.startup_plan == "off":
        return "startup_plan=off"
    if not ctx.config.cache.enabled:
        return "cache.enabled=false"
    if not isinstance(engine, RemembersSteps):
        return f"the engine '{ctx.config.engine.name}' remembers no steps"
    if ctx.ledger.source == "planned":
        return "nothing is measured on a planned device"
    if not any(KV_CACHE in ctx.resolve("stages", options["use"]).provides for options in ctx.config.stages.values()):
        return "this pipeline measures and goes no further"
    return None


def _ago(seconds: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
