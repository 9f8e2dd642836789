"""The built-in stages, each of which gets a signal after its work; and an engine that gets one while it is imported."""

from __future__ import annotations

import signal
from typing import Any

from orchestrator import Context, Stage
from orchestrator.config import Config
from orchestrator.engine.transformers import TransformersEngine
from orchestrator.stages.allocate_kv import AllocateKV as _AllocateKV
from orchestrator.stages.clear_caches import ClearCaches as _ClearCaches
from orchestrator.stages.dummy_data import DummyData as _DummyData
from orchestrator.stages.graph_capture import GraphCapture as _GraphCapture
from orchestrator.stages.load_weights import LoadWeights as _LoadWeights
from orchestrator.stages.profile_run import ProfileRun as _ProfileRun
from orchestrator.stages.verify import Verify as _Verify


def _then_a_signal(stage: type[Stage[Any]]) -> type[Stage[Any]]:
    def run(self: Stage[Any], ctx: Context) -> str | None:
        try:
            return stage.run(self, ctx)
        finally:
            signal.raise_signal(signal.SIGTERM)

    return type(stage.__name__, (stage,), {"run": run})


LoadWeights = _then_a_signal(_LoadWeights)
DummyData = _then_a_signal(_DummyData)
ProfileRun = _then_a_signal(_ProfileRun)
GraphCapture = _then_a_signal(_GraphCapture)
ClearCaches = _then_a_signal(_ClearCaches)
AllocateKV = _then_a_signal(_AllocateKV)
Verify = _then_a_signal(_Verify)


class CtrlC(_LoadWeights):
    def run(self, ctx: Context) -> str:
        signal.raise_signal(signal.SIGINT)
        return super().run(ctx)


class DuringImports(TransformersEngine):
    @staticmethod
    def imports(config: Config) -> tuple[str, ...]:
        return ("torch", "tests.signal_at_import")
