"""Flags of other engines that ask for the same start. Each means another share, which is computed from the ledger.

Sources: the engines' own documentation of their command lines and of how they size a KV cache (vLLM's CacheConfig and
worker, SGLang's pool configurator, LMDeploy's executor), versions 0.33, 0.5 and 0.16.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor
from typing import Any

from orchestrator.config import Config
from orchestrator.plan.footprint import Fit, Footprint

_DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Ask:
    """What another engine shall be asked for.

    Attributes:
        model: folder or hub id.
        dtype: of the weights. Left to themselves the engines make float16 of float32.
        sizes: batch sizes whose decode steps are captured; empty for none.
        vocabulary: rows of the output layer; None where the model does not say.
        takes_media: whether it does at all, whatever the limits say.
    """

    config: Config
    footprint: Footprint
    fit: Fit
    model: str
    dtype: str
    sizes: tuple[int, ...]
    vocabulary: int | None = None
    takes_media: bool = True

    @property
    def kv_bytes(self) -> int:
        """Of the usable blocks and one that the engine, too, keeps for itself."""
        return (self.fit.blocks + 1) * self.footprint.bytes_per_block

    @property
    def limits(self) -> dict[str, int]:
        """Items a prompt, by modality; none for a text model."""
        return dict(self.config.mm.limit_per_prompt.model_dump()) if self.takes_media else {}


@dataclass
class Exported:
    """A command, what its numbers mean, and what it cannot say."""

    command: list[str] = field(default_factory=list)
    means: list[str] = field(default_factory=list)
    cannot: list[str] = field(default_factory=list)

    def add(self, flag: str, *values: object) -> None:
        self.command += [flag, *map(str, values)]


def vllm(ask: Ask) -> Exported:
    config, footprint, out = ask.config, ask.footprint, Exported(["vllm", "serve", ask.model])
    _shared(out, ask)
    out.add("--max-model-len", ask.fit.max_model_len)
    out.add("--max-num-seqs", config.scheduler.max_num_seqs)
    out.add("--max-num-batched-tokens", config.scheduler.max_num_batched_tokens)
    out.add("--block-size", config.kv.block_size)
    out.add("--kv-cache-memory-bytes", ask.kv_bytes)
    share = (
        footprint.held_bytes - footprint.accounts["context"] + footprint.peak_bytes + ask.kv_bytes
    ) / footprint.total_bytes
    out.add("--gpu-memory-utilization", f"{ceil(share * 1000) / 1000:.3f}")
    if ask.sizes:
        out.add("--compilation-config", json.dumps({"cudagraph_capture_sizes": sorted(ask.sizes)}))
    else:
        out.add("--enforce-eager")
    if ask.limits:
        out.add("--limit-mm-per-prompt", json.dumps(_vllm_limits(config, ask.limits)))
    if config.mm.processor_kwargs:
        out.add("--mm-processor-kwargs", json.dumps(config.mm.processor_kwargs))
    out.means += [
        "--kv-cache-memory-bytes is the KV cache itself and decides; its block 0 is kept back too",
        "--gpu-memory-utilization is a share of the total that must be free at the start; its baseline is read after "
        "the CUDA context, which is charged to nobody and comes on top, so the same KV cache is a smaller share there",
    ]
    out.cannot += ["gpu.util as a ceiling: steps that take more than the profile run found may pass it"]
    if ask.takes_media:
        out.cannot += [
            "encoder.compute_budget, encoder.cache_size, encoder.micro_batch: fixed by its scheduler's limits"
        ]
        if config.mm.image.max_size or config.mm.video.max_size or config.mm.video.max_frames:
            out.cannot += ["media limits that are enforced: sizes in --limit-mm-per-prompt only shape the profile run"]
    return out


def sglang(ask: Ask) -> Exported:
    config, footprint = ask.config, ask.footprint
    out = Exported(["python", "-m", "sglang.launch_server", "--model-path", ask.model])
    _shared(out, ask)
    out.add("--context-length", ask.fit.max_model_len)
    out.add("--max-running-requests", config.scheduler.max_num_seqs)
    out.add("--chunked-prefill-size", config.scheduler.max_num_batched_tokens)
    out.add("--max-prefill-tokens", config.scheduler.max_num_batched_tokens)
    out.add("--page-size", config.kv.block_size)
    out.add("--max-total-tokens", ask.fit.tokens)
    before = footprint.free_bytes - footprint.accounts["context"]
    share = (footprint.accounts["weights"] + ask.kv_bytes) / before
    out.add("--mem-fraction-static", f"{ceil(share * 1000) / 1000:.3f}")
    if ask.sizes:
        out.add("--cuda-graph-bs", *sorted(ask.sizes))
    else:
        out.add("--disable-cuda-graph")
    if ask.limits:
        out.add("--limit-mm-data-per-request", json.dumps(ask.limits))
    if config.mm.processor_kwargs:
        out.add("--mm-process-config", json.dumps(dict.fromkeys(footprint.media_tokens, config.mm.processor_kwargs)))
    out.means += [
        "--max-total-tokens is the KV cache in tokens and decides",
        "--mem-fraction-static is the share, of what was free before the weights, for weights and KV cache together; "
        "steps, graphs and encoder share the rest, unmeasured",
    ]
    out.cannot += ["gpu.util as a ceiling: nothing profiles its steps, so the rest is not known to suffice"]
    if ask.takes_media:
        out.cannot += ["encoder.compute_budget, encoder.cache_size, encoder.micro_batch, media sizes (mm.*.max_size)"]
    return out


def lmdeploy(ask: Ask) -> Exported:
    config, footprint = ask.config, ask.footprint
    out = Exported(["lmdeploy", "serve", "api_server", ask.model, "--backend", "pytorch"])
    _shared(out, ask, load_format=False, dtypes=_DTYPES[:2])
    out.add("--session-len", ask.fit.max_model_len)
    out.add("--max-batch-size", config.scheduler.max_num_seqs)
    out.add("--max-prefill-token-num", config.scheduler.max_num_batched_tokens)
    out.add("--cache-block-seq-len", config.kv.block_size)
    out.add("--kernel-block-size", config.kv.block_size)
    free = footprint.free_bytes - footprint.accounts["context"] - footprint.accounts["weights"]
    rows = config.scheduler.max_num_batched_tokens + 2 * config.scheduler.max_num_seqs
    share = ask.kv_bytes / max(1, free - 2 * rows * (ask.vocabulary or 0))
    if share < 1:
        # Rounded down: what it finds free is in no one's hands, and a cache that is too large ends the start.
        out.add("--cache-max-entry-count", f"{floor(share * 1000) / 1000:.3f}")
    else:
        out.cannot += [
            "this KV cache: it reserves a logit of 2 bytes for each token of a step first, and too little is left"
        ]
    if ask.sizes:
        out.add("--cudagraph-capture-batch-sizes", *sorted(ask.sizes))
    else:
        out.add("--eager-mode")
    out.means += [
        "--cache-max-entry-count is a share of what is free once the weights are there, less 2 bytes for each of "
        f"{rows:,} rows of the vocabulary: so the same KV cache is another share for each model and card",
    ]
    if config.model.load_format == "dummy":
        out.cannot += ["model.load_format=dummy: it needs the weights"]
    if ask.dtype == "float32":
        out.cannot += ["model.dtype=float32: it has types of 16 bits alone, so weights and blocks take half there"]
    out.cannot += ["gpu.util as a ceiling: steps are reserved for by that formula and not measured"]
    if ask.takes_media:
        out.cannot += ["mm.limit_per_prompt, mm.processor_kwargs and encoder.*: images come as requests bring them"]
    return out


ENGINES: Mapping[str, Callable[[Ask], Exported]] = {"vllm": vllm, "sglang": sglang, "lmdeploy": lmdeploy}


def _shared(out: Exported, ask: Ask, *, load_format: bool = True, dtypes: Sequence[str] = _DTYPES) -> None:
    model = ask.config.model
    if ask.dtype in dtypes:
        out.add("--dtype", ask.dtype)
    if model.revision is not None:
        out.add("--revision", model.revision)
    if model.load_format == "dummy" and load_format:
        out.add("--load-format", "dummy")
    # Whether it is needed is known to whoever has the checkpoint; here no code of one is run.
    out.means.append("--trust-remote-code is to be added where a checkpoint comes with code, as InternVL's own does")
    if ask.config.kv.dtype not in ("auto", ask.dtype):
        out.cannot.append(f"kv.dtype={ask.config.kv.dtype}: its KV cache has the model's type, or one of 8 bits")


def _vllm_limits(config: Config, limits: Mapping[str, int]) -> dict[str, Any]:
    shapes: dict[str, dict[str, int]] = {}
    if config.mm.image.max_size is not None:
        shapes["image"] = dict(zip(("width", "height"), config.mm.image.max_size, strict=True))
    if config.mm.video.max_size is not None:
        shapes["video"] = dict(zip(("width", "height"), config.mm.video.max_size, strict=True))
    if config.mm.video.max_frames is not None:
        shapes.setdefault("video", {})["num_frames"] = config.mm.video.max_frames
    return {
        name: {"count": count, **shapes[name]} if name in shapes and count else count for name, count in limits.items()
    }
