"""The import server: waits for requests, forks a start for each, and tells its client how it ended.

One thread and no CUDA context, or a fork would not be safe.
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from orchestrator.records import ImportServerRecord
from orchestrator.signals import SIGNALS
from orchestrator.zygote.child import Job
from orchestrator.zygote.place import OwnFile, Place, deciding
from orchestrator.zygote.running import Running
from orchestrator.zygote.warm import Warm, threads
from orchestrator.zygote.wire import accept, receive, send

_REQUEST_S = 5.0
_TICK_S = 1.0


class Server:
    """
    Args:
        listener: bound and listening.
        lock: descriptor of the locked file that only one server of an environment holds.
        environment: of a successor, and what clients are compared with.
        idle_s: seconds without a start after which it ends; 0 for never.
        learns: import for later starts what one had to import itself.
    """

    def __init__(
        self,
        place: Place,
        listener: socket.socket,
        lock: int,
        environment: Mapping[str, str],
        *,
        idle_s: float,
        learns: bool,
    ) -> None:
        self._place, self._listener, self._lock = place, listener, lock
        self._socket = OwnFile(place.socket)
        self._environment, self._idle_s, self._learns = dict(environment), idle_s, learns
        self._warm = Warm()
        self._started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._is_ending = False
        self._selector = selectors.DefaultSelector()
        self._running = Running(self._selector, self._say)
        self._wakes, self._wakeup = socket.socketpair()

    def serve(self) -> Job | None:
        """None once the server has ended; in a process that was forked for a start, that start."""
        self._warm.load()
        self._say(f"ready, {len(sys.modules)} modules imported in {self._warm.import_s:.1f} s")
        self._watch()
        while not (self._is_ending and not self._running):
            for key, _ in self._selector.select(_TICK_S):
                if key.fileobj is self._listener:
                    # It may have ended a moment ago.
                    job = None if self._is_ending else self._accept()
                    if job is not None:
                        return job
                elif key.fileobj is self._wakes:
                    self._heed(self._wakes.recv(64))
                else:
                    self._running.hear(key.data)
            self._running.kill_overdue()
            if not self._socket.is_there:
                self._end(f"{self._place.socket} is gone")
            if self._idle_s and not self._running and time.monotonic() - self._running.last > self._idle_s:
                self._end(f"no start for {self._idle_s:g} s")
        self._say("ended")
        return None

    def _watch(self) -> None:
        self._wakes.setblocking(False)
        self._wakeup.setblocking(False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self) -> Job | None:
        connection = accept(self._listener, os.getuid(), _REQUEST_S)
        if connection is None:
            self._say("refused another user")
            return None
        try:
            if (received := receive(connection)) is not None:
                return self._answer(connection, *received)
        except OSError as error:
            self._say(f"a client failed: {error}")
        connection.close()
        return None

    def _answer(self, connection: socket.socket, message: dict[str, Any], files: list[int]) -> Job | None:
        what = message.get("do")
        if what == "start" and len(files) == 3:
            return self._start(connection, message, files)
        for each in files:
            os.close(each)
        if what == "status":
            send(connection, self._status())
        elif what == "stop":
            self._end("asked to")
            send(connection, {"running": len(self._running), "pid": os.getpid()})
        connection.close()
        return None

    def _start(self, connection: socket.socket, message: dict[str, Any], files: list[int]) -> Job | None:
        changed = self._warm.changed()
        if changed is not None:
            self._succeed(f"{changed} has changed")
            send(connection, {"restarting": f"{changed} has changed"})
            pid = None
        else:
            learned = os.memfd_create("learned")
            # Until the start has handlers of its own: one that came between would be lost to the server's.
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            server_pid = os.getpid()
            pid = os.fork()
            if pid == 0:
                self._leave(connection)
                record = ImportServerRecord(
                    pid=server_pid, started_at=self._started_at, import_s=self._warm.import_s, request_s=0.0
                )
                return Job(message, files, learned, record)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        for each in files:
            os.close(each)
        if pid is None:
            connection.close()
            return None
        self._running.add(pid, connection, [str(each) for each in message.get("arguments", ())], learned)
        return None

    def _leave(self, connection: socket.socket) -> None:
        """In the forked process: keep nothing of the server's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for each in (self._wakes, self._wakeup, self._listener, connection):
            each.close()
        os.close(self._lock)
        self._running.leave()

    def _heed(self, signals: bytes) -> None:
        if signal.SIGTERM in signals or signal.SIGINT in signals:
            self._end("told by a signal")
        names = self._running.reap()
        if names and self._learns and not self._is_ending:
            before = threads()
            self._warm.learn(names)
            if threads() > before:
                self._learns = False
                self._succeed("a module that the last start imported has made threads here")

    def _status(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "started_at": self._started_at,
            "import_s": self._warm.import_s,
            "modules": len(sys.modules),
            "threads": threads(),
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "starts": self._running.count,
            "running": self._running.listed(),
            "environment": sorted(deciding(self._environment)),
        }

    def _succeed(self, why: str) -> None:
        """Give the socket, and whoever waits at it, to a server that imports anew; what runs here runs on."""
        self._say(f"{why}: restarting")
        command = [sys.executable, "-m", "orchestrator.zygote", "serve", f"--idle-s={self._idle_s:g}"]
        command += [f"--listener={self._listener.fileno()}", f"--lock={self._lock}", f"--socket={self._place.socket}"]
        command += [] if self._learns else ["--learns-nothing"]
        subprocess.Popen(
            command,
            env=self._environment,
            pass_fds=(self._listener.fileno(), self._lock),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._close()

    def _end(self, why: str) -> None:
        if not self._is_ending:
            self._say(f"ending: {why}; {len(self._running)} starts run on")
            self._socket.remove()
            self._close()

    def _close(self) -> None:
        self._is_ending = True
        self._selector.unregister(self._listener)
        self._listener.close()
        os.close(self._lock)

    def _say(self, line: str) -> None:
        sys.stdout.write(f"{datetime.now().isoformat(timespec='milliseconds')} {os.getpid()} {line}\n")
        sys.stdout.flush()
