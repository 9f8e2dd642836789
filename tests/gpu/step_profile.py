"""Where a step's time goes, kernel by kernel, and where a capture's; prints one JSON line.

The flagship with random weights: prefill of 8,192 tokens, decode of 256 sequences of 256 tokens, the encoder on its
largest image, and the capture of 35 batch sizes. A part that fails says so in its place, and the others go on.
"""

from __future__ import annotations

import cProfile
import gc
import json
import pstats
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image

from orchestrator import Media, start
from orchestrator.engine.graphs import DecodeGraphs
from orchestrator.engine.step import Chunk, OpenRequest, Step
from orchestrator.modality.base import DummyBatch
from orchestrator.stages.graph_capture import capture_sizes
from tests.gpu.throughput import decode_step, text_requests
from tests.gpu.trace import profiled

OVERRIDES = (
    "device=cuda",
    "model=internvl2_5_8b",
    "model.load_format=dummy",
    "kv.bytes=40GiB",
    "graphs.mode=none",
    "scheduler.max_num_batched_tokens=8192",
    "stages.verify.mode=off",
)


def host_profile(work: Callable[[], Any], lines: int = 18) -> list[list[Any]]:
    """Functions by their own time under Python's profiler: [calls, own seconds, with callees, name]."""
    profiler = cProfile.Profile()
    profiler.runcall(work)
    torch.cuda.synchronize()
    stats: dict[Any, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    rows = sorted(stats.items(), key=lambda item: -item[1][2])[:lines]
    return [
        [calls, round(own, 5), round(whole, 5), f"{'/'.join(Path(file).parts[-2:])}:{line} {name}"]
        for (file, line, name), (calls, _, own, whole, _) in rows
    ]


def wall(work: Callable[[], Any], times: int) -> dict[str, float]:
    """Seconds until the device is done, and until the host is."""
    host, whole = [], []
    for _ in range(times):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        host.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - begin)
    return {"median_s": median(whole), "min_s": min(whole), "host_median_s": median(host)}


class Probe:
    """The inside of a started engine."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.runner, self.memory = engine._need().runner, engine._need_memory()
        self.encoder, self.device, self.cache = engine._need_encoder(), engine._device, self.memory.cache

    def sequences(self, count: int, tokens: int, decoding: bool) -> list[OpenRequest]:
        made = []
        for _ in range(count):
            prompt = [100] * (tokens - decoding)
            sequence = OpenRequest(prompt, 64, output=[7] if decoding else [])
            sequence.blocks = self.memory.pool.allocate(-(-(tokens + 64) // self.cache.block_size))
            made.append(sequence)
        return made

    def free(self, sequences: Sequence[OpenRequest]) -> None:
        for sequence in sequences:
            self.memory.pool.free(sequence.blocks)

    def prefill(self, count: int, tokens: int) -> dict[str, Any]:
        sequences = self.sequences(count, tokens, decoding=False)
        step = Step(tuple(Chunk(sequence, 0, tokens) for sequence in sequences))

        def work() -> None:
            self.runner.execute(step, self.cache, self.encoder)

        work()
        inputs = self.runner.prepare(step, self.cache.block_size, self.encoder.index)
        result = {
            "whole": wall(work, 5),
            "prepare": wall(lambda: self.runner.prepare(step, self.cache.block_size, self.encoder.index), 3),
            "forward": wall(lambda: self.runner.forward(inputs, self.cache, self.encoder), 3),
            "device": profiled(work),
            "host": host_profile(work, 12),
        }
        self.free(sequences)
        return result

    def decode(self) -> dict[str, Any]:
        graphs = self.memory.graphs
        sequences = self.sequences(256, 256, decoding=True)
        step = Step(tuple(Chunk(sequence, 255, 256) for sequence in sequences))

        def replays() -> None:
            for _ in range(10):
                graphs._graphs[256].replay()

        graphs.execute(step)
        result: dict[str, Any] = {
            "execute": wall(lambda: graphs.execute(step), 10),
            "fill": wall(lambda: graphs._fill(step.chunks, 256), 10),
            "ten_replays": wall(replays, 3),
            "device": profiled(replays, 10),
        }
        self.free(sequences)
        result["loop_step_s"] = decode_step(self.engine, 256, 120)
        requests = text_requests(256, 120, 24)
        result["loop_host"] = host_profile(lambda: self.engine.generate(requests), 30)
        return result

    def encode(self) -> dict[str, Any]:
        result: dict[str, Any] = {"micro_batches": dict(self.runner._encoder._micro_batches)}
        item = self.engine.media_inputs(Media("image", Image.new("RGB", (5376, 448), (9, 99, 200))))
        result["dtypes"] = {name: str(tensor.dtype) for name, tensor in item.tensors.items()}
        result["tiles"] = [len(tensor) for tensor in item.tensors.values()]
        small = self.engine.media_inputs(Media("image", Image.new("RGB", (448, 448), (9, 99, 200))))
        for label, each, count in (("13 tiles", item, 1), ("26 tiles", item, 2), ("1 tile", small, 1)):
            batch = DummyBatch({"image": each})
            self.engine.encode_dummy(batch, {"image": count})
            arguments = self.runner._encoder._arguments([each] * count)
            on_device = {name: tensor.to("cuda:0", torch.bfloat16) for name, tensor in arguments.items()}
            rows = each.num_embeds * count

            def whole(batch: DummyBatch = batch, count: int = count) -> None:
                self.engine.encode_dummy(batch, {"image": count})

            @torch.inference_mode()
            def inner(on_device: dict[str, torch.Tensor] = on_device, rows: int = rows) -> None:
                self.runner._encoder._encode("image", on_device, rows)

            inner()
            result[label] = {
                "whole": wall(whole, 5),
                "inner_from_device": wall(inner, 5),
                "device": profiled(whole),
                "host": host_profile(inner, 10),
            }
        self.engine.clear_caches()
        return result

    def captures(self) -> dict[str, Any]:
        """What a capture is made of. The first size is warmed up; the others are tried without, each fresh."""
        graphs = DecodeGraphs(self.device, self.runner, self.cache, self.encoder, self.engine.max_model_len)
        sizes = capture_sizes("auto", 256)
        from orchestrator.engine.graphs import _Buffers

        blocks = -(-self.engine.max_model_len // self.cache.block_size)
        buffers = _Buffers(256, blocks, self.runner.position_axes, self.device)
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        result: dict[str, Any] = {"sizes": {}}
        kept: dict[int, Any] = {}
        for size in sizes:
            inputs = buffers.first(size, self.engine.max_model_len)

            @torch.inference_mode()
            def work(inputs: Any = inputs) -> tuple[torch.Tensor, ...]:
                hidden = self.runner.forward(inputs, self.cache, self.encoder)
                return (hidden, *self.runner.choose(hidden))

            result["sizes"][size] = self._one_capture(size, work, pool, stream, kept, warm=size == sizes[0])
        result["replays_equal_eager"] = self._compare(buffers, kept)
        if sizes:
            result["host_of_a_forward"] = host_profile(work, 25)
        # As the engine does it, now that every kernel is loaded.
        kept.clear()
        del graphs
        gc.collect()
        torch.cuda.empty_cache()
        begin = time.perf_counter()
        captured = self.engine.capture(sizes)
        result["engine_again_s"] = time.perf_counter() - begin
        result["engine_again"] = {graph.size: round(graph.seconds, 4) for graph in captured}
        result["snapshot_s"] = wall(self.device.snapshot, 10)
        return result

    def _one_capture(
        self, size: int, work: Callable[[], Any], pool: Any, stream: Any, kept: dict[int, Any], *, warm: bool
    ) -> dict[str, Any]:
        marks = [time.perf_counter()]

        def mark() -> None:
            marks.append(time.perf_counter())

        row: dict[str, Any] = {}
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.stream(stream):
                if warm:
                    work()
                mark()
                stream.synchronize()
                mark()
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    outputs = work()
                    mark()
                finally:
                    graph.capture_end()
                mark()
            graph.replay()
            torch.cuda.synchronize()
            mark()
            graph.replay()
            torch.cuda.synchronize()
            mark()
            kept[size] = (graph, outputs)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        labels = ("warm_up", "wait", "launch", "end_and_instantiate", "first_replay", "second_replay")
        steps = [after - before for before, after in pairwise(marks)]
        return row | {label: round(spent, 5) for label, spent in zip(labels, steps, strict=False)}

    @torch.inference_mode()
    def _compare(self, buffers: Any, kept: dict[int, Any]) -> dict[int, float]:
        """The largest difference of hidden states between a replay and an eager step."""
        found = {}
        for size in [size for size in kept if size in (1, 8, 32, 64, 200, 256)]:
            graph, outputs = kept[size]
            graph.replay()
            inputs = buffers.first(size, self.engine.max_model_len)
            eager = self.runner.forward(inputs, self.cache, self.encoder)
            found[size] = float((eager - outputs[0]).abs().max())
        return found


def attempt(work: Callable[[], Any]) -> Any:
    begin = time.perf_counter()
    try:
        result = work()
    except Exception:
        result = {"failed": traceback.format_exc()[-1500:]}
    return result | {"took_s": round(time.perf_counter() - begin, 2)}


def main() -> None:
    begin = time.perf_counter()
    with start([*OVERRIDES, *sys.argv[1:]]) as started:
        probe = Probe(started.engine)
        result: dict[str, Any] = {
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(),
            "start_s": round(time.perf_counter() - begin, 2),
            "capture": attempt(probe.captures),
            "decode": attempt(probe.decode),
            "prefill 1 x 8192": attempt(lambda: probe.prefill(1, 8192)),
            "prefill 8 x 1024": attempt(lambda: probe.prefill(8, 1024)),
            "encoder": attempt(probe.encode),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
