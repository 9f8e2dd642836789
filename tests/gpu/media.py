"""What media cost: starts with 1, 4 and 16 images a prompt, encoder pieces as one call and chosen; one JSON line."""

from __future__ import annotations

import json
from typing import Any

from orchestrator import start

COMMON = (
    "device=cuda",
    "model.load_format=dummy",
    "gpu.util=0.9",
    "scheduler.max_model_len=32768",
    "scheduler.max_num_batched_tokens=8192",
    "scheduler.max_num_seqs=64",
    "encoder.compute_budget=65536",
    "encoder.cache_size=65536",
    "graphs.mode=none",
    "stages.verify.mode=off",
)


def row(model: str, images: int, micro_batch: str) -> dict[str, Any]:
    overrides = [f"model={model}", f"mm.limit_per_prompt.image={images}", f"encoder.micro_batch={micro_batch}"]
    # A lone request: what one prompt may carry is then what a step may have to encode.
    with start([*COMMON, *overrides, "scheduler.max_num_seqs=1"]) as started:
        record = started.record
    profile = next(stage for stage in record.stages if stage.slot == "profile_run").metrics
    assert record.kv_cache is not None and record.ledger is not None
    return {
        "model": model,
        "images": images,
        "micro_batch": micro_batch,
        "chosen": profile["micro_batch"],
        "allocated_bytes": profile["allocated_bytes"],
        "peak_activation_bytes": record.ledger.accounts["peak_activation"],
        "set_by": profile["set_by"],
        "num_gpu_blocks": record.kv_cache.num_gpu_blocks,
    }


def main() -> None:
    rows = [
        row(model, images, micro_batch)
        for model in ("internvl2_5_8b", "qwen2_5_vl_3b")
        for images in (1, 4, 16)
        for micro_batch in ("auto", str(images))
        # One call with 16 of Qwen's largest images is beyond any card.
        if not (model == "qwen2_5_vl_3b" and micro_batch == "16")
    ]
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
