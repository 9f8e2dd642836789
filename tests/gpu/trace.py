"""What torch's profiler saw of the device, summed up by kinds of kernels."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

GROUPS = (
    ("attention", r"decode_kernel|combine_kernel|prefill_kernel|flash|fmha|attention"),
    ("gemm", r"gemm|cutlass|nvjet|xmma|cublas|splitk|gemv|sm90_|sm80_"),
    ("norm", r"layer_norm|rms_?norm|rowwisemoments"),
    ("convolution", r"conv|cudnn|implicit"),
    ("softmax", r"softmax"),
    ("reduce", r"reduce"),
    ("cat", r"catarray"),
    ("index", r"index|gather|scatter"),
    ("sort", r"sort|scan|radix"),
    ("cast and copy kernels", r"copy_kernel|loadwithcast|bfloat16_copy|float16_copy"),
    ("elementwise", r"elementwise"),
)


def group(name: str) -> str:
    return next((label for label, pattern in GROUPS if re.search(pattern, name, re.IGNORECASE)), "other")


def short(name: str) -> str:
    """A kernel's name without what all of them share."""
    for noise in ("at::native::", "void ", "(anonymous namespace)::", "at::detail::", "std::", "c10::"):
        name = name.replace(noise, "")
    return name[:150]


def profiled(work: Callable[[], Any], steps: int = 1) -> dict[str, Any]:
    """What the device did during `work`, in seconds for one of its `steps`."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        spent = time.perf_counter() - begin
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return {"wall_s": spent / steps} | summary(events, steps)


def summary(events: Sequence[dict[str, Any]], steps: int) -> dict[str, Any]:
    """A trace's events of the device, in seconds for one step."""
    names = {"kernel": "", "gpu_memcpy": "copies over the bus", "gpu_memset": "memset"}
    device = [event for event in events if event.get("cat") in names and "dur" in event]
    device.sort(key=lambda event: event["ts"])
    by_group: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in device:
        by_group[names[event["cat"]] or group(event["name"])] += event["dur"]
        kernels[short(event["name"])] += event["dur"]
        counts[short(event["name"])] += 1
    busy, gaps = _busy_and_gaps(device)
    scale = 1e-6 / steps
    return {
        "busy_s": busy * scale,
        "span_s": (device[-1]["ts"] + device[-1]["dur"] - device[0]["ts"]) * scale if device else 0,
        "num_kernels": len(device) / steps,
        "idle_gaps_over_50us": {
            "count": len([gap for gap in gaps if gap > 50]) / steps,
            "s": sum(gap for gap in gaps if gap > 50) * scale,
        },
        "idle_small_gaps_s": sum(gap for gap in gaps if gap <= 50) * scale,
        "groups_s": {label: taken * scale for label, taken in by_group.most_common()},
        "top": [[round(taken * scale, 7), counts[name] / steps, name] for name, taken in kernels.most_common(25)],
    }


def _busy_and_gaps(device: Sequence[dict[str, Any]]) -> tuple[float, list[float]]:
    """Microseconds in which anything ran, and those between, of events in their order."""
    busy, gaps, until = 0.0, [], None
    for event in device:
        begin, end = event["ts"], event["ts"] + event["dur"]
        if until is not None and begin > until:
            gaps.append(begin - until)
        busy += max(0.0, end - max(begin, until if until is not None else begin))
        until = end if until is None else max(until, end)
    return busy, gaps
