"""What a plan depends on. Everything that is not known to be without effect is in it."""

from __future__ import annotations

import os
import platform
from typing import Any

from orchestrator.artifacts import KV_CACHE
from orchestrator.config import Config
from orchestrator.device.base import Device
from orchestrator.engine.base import Engine
from orchestrator.engine.remembering import RemembersSteps
from orchestrator.environment import version_of
from orchestrator.errors import UnknownNameError
from orchestrator.sources import identity_of, own_code
from orchestrator.stage import Context, Resolver
from orchestrator.startup_plan.learned import SCHEMA

_WITHOUT_EFFECT: dict[str, Any] = {
    # Where records, logs and the cache go, and what random weights are drawn from.
    "run": True,
    "log": True,
    "cache": True,
    "startup_plan": True,
    # How much there is decides how many blocks fit, not what a step takes. Where it ended a search, nothing is kept.
    "gpu": True,
    "kv": {"bytes", "dtype"},
    # Said by what was found: the device, the checkpoint, its classes and element types, and the stages' own code.
    "device": True,
    "model": {"name", "path", "revision", "dtype"},
    "scheduler": {"max_model_len"},
    "engine": {"attention"},
    "weights": {"io", "threads", "chunk_bytes"},
    "stages": True,
}
_LIBRARIES = ("torchvision", "transformers", "triton", "numpy", "kernels")
_ENVIRONMENT = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUDA_MODULE_LOADING",
    "NVIDIA_TF32_OVERRIDE",
    "MALLOC_ARENA_MAX",
    # On a CPU: another allocator in the C library's place, and what tunes either.
    "LD_PRELOAD",
    "GLIBC_TUNABLES",
    "MALLOC_CONF",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
)
"""What changes how much the allocators and the libraries take."""


def parts(ctx: Context, engine: Engine, remembers: RemembersSteps) -> dict[str, Any]:
    """By name; what `fingerprint` takes."""
    config = ctx.config
    return {
        "kind": "startup plan",
        "schema": SCHEMA,
        "config": config.model_dump(mode="json", by_alias=True, exclude=_WITHOUT_EFFECT),
        "max_model_len": engine.max_model_len,
        "kv_dtype": engine.kv_spec.dtype,
        "processor": engine.processor_identity,
        "encoder_dtype": engine.encoder_dtype,
        "identity": dict(remembers.plan_identity),
        "engine": identity_of(type(engine)),
        "profiler": _profiler(ctx, engine),
        "stages": stages(config, ctx.resolve),
        "device": _device(ctx.device),
        "libraries": _libraries(),
        "environment": {name: os.environ.get(name) for name in _ENVIRONMENT},
        "sources": own_code(),
    }


def stages(config: Config, resolve: Resolver) -> list[Any]:
    """The stages up to the one that makes the KV cache: class, options and code of each. Slots are only names, and how
    long a stage may take changes nothing."""
    found: list[Any] = []
    for options in config.stages.values():
        cls = resolve("stages", options["use"])
        given = {name: value for name, value in options.items() if name not in ("use", "timeout_s")}
        found.append([identity_of(cls), given])
        if KV_CACHE in cls.provides:
            break
    return found


def _profiler(ctx: Context, engine: Engine) -> list[Any]:
    if not engine.modalities():
        return []
    name = ctx.config.model.profiler
    model_type = str(engine.model_config.model_type)
    for candidate in (model_type, "generic") if name == "auto" else (name,):
        try:
            return identity_of(ctx.resolve("profilers", candidate))
        except UnknownNameError:
            continue
    return []


def _device(device: Device) -> dict[str, Any]:
    """Its kind and type, not which one of them: neither its number nor its UUID."""
    info = device.info()
    said: dict[str, Any] = {
        "kind": info.kind,
        "name": info.name,
        "driver": info.driver,
        "capability": info.capability,
        "graphs": device.supports_graphs,
        "maps_memory": device.virtual_memory_refusal is None,
    }
    return said | _processor() if device.torch_device == "cpu" else said


def _processor() -> dict[str, Any]:
    """Each thread has buffers of its own, and kernels are chosen by what the processor can do."""
    import torch

    return {"threads": torch.get_num_threads(), "instructions": torch.backends.cpu.get_cpu_capability()}


def _libraries() -> dict[str, str | int | None]:
    import torch

    found: dict[str, str | int | None] = {name: version_of(name) for name in _LIBRARIES}
    return found | {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
    }
