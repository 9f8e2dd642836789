"""The share swept from 0.90 to 0.99, and five starts at 0.99, one after the other in one process; prints one JSON line.

Each is verified quickly. The first start of a process also pays for the context, so its KV cache is smaller by that.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from orchestrator import start

OVERRIDES = (
    "device=cuda",
    "model=internvl2_5_8b",
    "model.load_format=dummy",
    "scheduler.max_model_len=32768",
    "scheduler.max_num_batched_tokens=8192",
    "graphs.sizes=[256,64,16,4,1]",
    "stages.verify.num_requests=2",
    "stages.verify.max_tokens=4",
)


def row(util: float) -> dict[str, Any]:
    """One start: what was asked for, held, left, and whether it verified."""
    with start([*OVERRIDES, f"gpu.util={util:.2f}", *sys.argv[1:]]) as started:
        record = started.record
    assert record.ledger is not None and record.kv_cache is not None
    return {
        "util": util,
        "status": record.status,
        "requested_bytes": record.ledger.requested_bytes,
        "peak_held_bytes": record.ledger.peak_held_bytes,
        "residual_bytes": record.ledger.residual_bytes,
        "num_gpu_blocks": record.kv_cache.num_gpu_blocks,
        "kv_bytes": record.ledger.accounts["kv_cache"],
        "total_s": record.total_s,
    }


def main() -> None:
    swept = [row(step / 100) for step in range(90, 100)]
    repeated = [row(0.99) for _ in range(5)]
    over = [one for one in (*swept, *repeated) if one["peak_held_bytes"] > one["requested_bytes"]]
    print(json.dumps({"swept": swept, "repeated": repeated, "over_the_line": over}))


if __name__ == "__main__":
    main()
