"""The starts that are predicted first and measured afterwards, and what is kept of each.

A point is a model with some number of media in a prompt; its other settings see to it that as many are encoded in a
step, that decode graphs are of several numbers, and that peaks come from several parts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.records import RunRecord
from tests.gpu.sources import sources_hash

HERE = Path(__file__).resolve().parent
PREDICTIONS = HERE / "predictions"
MEASURED = HERE / "measured"

_COMMON = (
    "model.load_format=dummy",
    "gpu.util=0.9",
    "scheduler.max_num_batched_tokens=8192",
    "stages.verify.mode=off",
)
_METRICS = {
    "dummy_data": ("modalities",),
    "profile_run": (
        *("peaks_bytes", "allocated_bytes", "kept_bytes", "set_by", "encoder_items", "micro_batch", "piece_tokens"),
        *("micro_batch_trials_bytes", "encoder_compute_budget", "encoder_cache_size", "num_tokens", "context_tokens"),
    ),
    "graph_capture": ("graphs", "bytes"),
    "allocate_kv": ("rehearsed_bytes", "rehearsed_allocated_bytes"),
}


@dataclass(frozen=True)
class Point:
    """A start: a model's name, and the settings of this point."""

    model: str
    name: str
    settings: tuple[str, ...] = ()

    @property
    def overrides(self) -> list[str]:
        """Without a device."""
        own = {text.partition("=")[0] for text in self.settings}
        common = [text for text in _COMMON if text.partition("=")[0] not in own]
        # A model that is not one of the project's has its name among the settings, and a text model's others.
        base = "opt_125m" if "model.name" in own else self.model
        return [f"model={base}", *common, *self.settings]


def _images(model: str, four: int, sixteen: tuple[str, ...]) -> list[Point]:
    """One image with everything else as a start has it; four largest and sixteen in a step."""
    return [
        Point(model, "1", ("mm.limit_per_prompt.image=1",)),
        Point(model, "4", ("mm.limit_per_prompt.image=4", *_step_of(four), "scheduler.max_num_seqs=64")),
        Point(model, "16", ("mm.limit_per_prompt.image=16", *sixteen, "scheduler.max_num_seqs=16")),
    ]


def _step_of(tokens: int) -> tuple[str, str]:
    return (f"encoder.compute_budget={tokens}", f"encoder.cache_size={tokens}")


POINTS = (
    *_images("internvl2_5_8b", 4 * 3328, _step_of(16 * 3328)),
    *_images("qwen2_5_vl_3b", 4 * 16384, (*_step_of(16 * 1369), "mm.image.max_size=[1024,1024]")),
    *_images("qwen2_5_vl_7b", 4 * 16384, (*_step_of(16 * 1369), "mm.image.max_size=[1024,1024]")),
    *_images("llava_onevision_7b", 4 * 8765, (*_step_of(16 * 3699), "mm.image.max_size=[768,768]")),
    Point("qwen2_audio_7b", "1", ("mm.limit_per_prompt={image: 0, audio: 1}",)),
    Point("qwen2_audio_7b", "4", ("mm.limit_per_prompt={image: 0, audio: 4}", "scheduler.max_num_seqs=1")),
    Point(
        "qwen2_audio_7b",
        "16",
        ("mm.limit_per_prompt={image: 0, audio: 16}", *_step_of(16 * 750), "scheduler.max_num_seqs=16"),
    ),
    Point("opt_125m", "1"),
    Point("opt_125m", "4", ("scheduler.max_num_batched_tokens=2048", "scheduler.max_num_seqs=64")),
    Point("opt_125m", "16", ("scheduler.max_num_batched_tokens=16384", "scheduler.max_num_seqs=16")),
)
_TEXT = ("scheduler.max_model_len=auto", "model.path=null")
TEXT_POINTS = (
    Point("llama_3_8b", "1", ("model.name=tests.gpu.text_models:Llama3", *_TEXT)),
    Point("smollm2_135m", "1", ("model.name=tests.gpu.text_models:SmolLM2", *_TEXT)),
)
"""Beside other planners, which know text models only."""

MODELS = tuple(dict.fromkeys(point.model for point in POINTS))
TEXT_MODELS = tuple(point.model for point in TEXT_POINTS)


def points_of(model: str) -> list[Point]:
    return [point for point in (*POINTS, *TEXT_POINTS) if point.model == model]


def facts(record: RunRecord) -> dict[str, Any]:
    """What a prediction and a measurement are compared by, and what explains a difference."""
    by_use = {stage.use: stage for stage in record.stages}
    metrics = {
        use: {name: by_use[use].metrics[name] for name in names if name in by_use[use].metrics}
        for use, names in _METRICS.items()
        if use in by_use
    }
    memory = {use: by_use[use].memory.model_dump() for use in _METRICS if use in by_use}
    return {
        "status": record.status,
        "error": record.error.message if record.error else None,
        "total_s": round(record.total_s, 3),
        "device": {name: record.device.get(name) for name in ("name", "total_bytes", "capability", "driver")},
        "versions": {name: record.versions.get(name) for name in ("torch", "transformers", "cuda")},
        "ledger": record.ledger.model_dump() if record.ledger else None,
        "kv_cache": record.kv_cache.model_dump() if record.kv_cache else None,
        "metrics": metrics,
        "memory": memory,
    }


def write(folder: Path, model: str, found: dict[str, dict[str, Any]]) -> None:
    """The points of a model so far, whole or as they were before."""
    folder.mkdir(parents=True, exist_ok=True)
    overrides = {point.name: point.overrides for point in points_of(model)}
    whole = {"model": model, "sources": sources_hash(), "overrides": overrides, "points": found}
    path = folder / f"{model}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(whole, indent=1) + "\n")
    partial.replace(path)


def read(folder: Path, model: str) -> dict[str, Any] | None:
    path = folder / f"{model}.json"
    return json.loads(path.read_text()) if path.is_file() else None
