"""A process that does not keep still on the device: `python -m tests.gpu.restless [--cpu]`.

Each line on its input is a habit, answered once it has begun: `grow`, `shrink`, `saw`, or `stop`, which gives all back.
"""

from __future__ import annotations

import sys
import threading

import torch

from orchestrator.units import GiB, MiB

STEPS = 20
PAUSE_S = 0.05


class Restless:
    """Holds up to `STEPS` pieces of memory, and changes their number while a habit lasts."""

    def __init__(self, device: str, piece: int) -> None:
        self._device, self._piece = device, piece
        self._held: list[torch.Tensor] = []
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, habit: str) -> None:
        self.stop()
        if habit == "shrink":
            self._take(STEPS)
        self._done.clear()
        self._thread = threading.Thread(target=self._go, args=(habit,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._drop(STEPS)

    def _go(self, habit: str) -> None:
        upwards = True
        while not self._done.wait(PAUSE_S):
            if habit == "saw" and len(self._held) in (0, STEPS):
                upwards = not self._held
            if habit == "grow" or (habit == "saw" and upwards):
                self._take(1)
            else:
                self._drop(1)

    def _take(self, count: int) -> None:
        for _ in range(min(count, STEPS - len(self._held))):
            self._held.append(torch.ones(self._piece, dtype=torch.uint8, device=self._device))

    def _drop(self, count: int) -> None:
        del self._held[max(0, len(self._held) - count) :]
        if self._device != "cpu":
            torch.cuda.empty_cache()


def main() -> None:
    cpu = "--cpu" in sys.argv
    restless = Restless("cpu" if cpu else "cuda:0", MiB if cpu else GiB)
    print("ready", flush=True)
    for line in sys.stdin:
        habit = line.strip()
        if habit == "stop":
            restless.stop()
        else:
            restless.begin(habit)
        print(habit, flush=True)


if __name__ == "__main__":
    main()
