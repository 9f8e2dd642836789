"""Other processes, driven by lines: a worker that starts engines and a watch that reads what it holds."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.gpu.sources import ROOT
from tests.starts import environment


class Lines:
    """A child process that answers each line with a line."""

    def __init__(self, module: str, *arguments: str, folder: Path = ROOT) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=folder,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def read(self) -> str:
        """The next line.

        Raises:
            EOFError: the process has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EOFError(f"process {self._process.pid} ended with {self._process.wait()}")
        return line.strip()

    def end(self) -> None:
        """Close its input and wait. May be called again."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        self._process.wait()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


class Worker(Lines):
    """A `tests.gpu.worker`. `begin` and `answer` apart let several work at once."""

    def __init__(self, folder: Path, common: Sequence[str]) -> None:
        super().__init__("tests.gpu.worker", folder=folder)
        self._common = list(common)
        self._pid: int | None = None

    @property
    def pid(self) -> int:
        """Waits until everything is imported."""
        if self._pid is None:
            self._pid = int(json.loads(self.read())["pid"])
        return self._pid

    def begin(self, do: str, **arguments: Any) -> None:
        assert self.pid
        self.write(json.dumps({"do": do, **arguments}))

    def answer(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(self.read())
        return result

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.begin(do, **arguments)
        return self.answer()

    def begin_start(self, name: str, *overrides: str) -> None:
        self.begin("start", name=name, overrides=[*self._common, *overrides])

    def start(self, name: str, *overrides: str) -> dict[str, Any]:
        self.begin_start(name, *overrides)
        return self.answer()


class Watch(Lines):
    """A `tests.gpu.watch` of a process."""

    def __init__(self, pid: int, *, cpu: bool = False) -> None:
        super().__init__("tests.gpu.watch", str(pid), *(["--cpu"] if cpu else []))
        assert self.read() == "ready"

    def take(self) -> dict[str, Any]:
        """Peak and present bytes since the last call."""
        self.write("")
        result: dict[str, Any] = json.loads(self.read())
        return result
