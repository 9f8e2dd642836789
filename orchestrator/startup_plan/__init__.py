"""The start-up plan: what a start learned, kept in the disk cache and taken over by starts of the same fingerprint."""

from orchestrator.startup_plan.deviation import deviation, differs
from orchestrator.startup_plan.finding import STARTUP_PLAN, StartupPlan, startup_plan
from orchestrator.startup_plan.learned import Learned, Measured, Part

__all__ = ["STARTUP_PLAN", "Learned", "Measured", "Part", "StartupPlan", "deviation", "differs", "startup_plan"]
