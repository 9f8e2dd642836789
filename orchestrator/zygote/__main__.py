"""`python -m orchestrator.zygote`: keep a parent with everything imported, and fork starts from it."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.arguments import Parser, seconds_or_none
from orchestrator.errors import UserError
from orchestrator.zygote.client import ask, run
from orchestrator.zygote.place import Place, place_of

_IDLE_S = 3600.0
_TAIL = 2000
_TRIES, _WAIT_S = 6, 0.5


def main(argv: Sequence[str]) -> int:
    """The exit code; of the start itself for `run`."""
    _fill_standard_descriptors()
    try:
        # What follows `run` is the start's, also what looks like an option.
        if argv[:1] == ["run"]:
            return run(place_of(os.environ), argv[1:])
        arguments = _parser().parse_args(argv)
        return int(arguments.act(arguments))
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


def _start(arguments: argparse.Namespace) -> int:
    place = place_of(os.environ)
    for _ in range(_TRIES):
        lock = _lock(place)
        if lock is not None:
            _spawn(place, lock, arguments.idle_s)
        status = ask(place, "status")
        if status is not None or lock is not None:
            break
        # Another one holds the lock and cannot be reached: it has just begun, or is about to end.
        time.sleep(_WAIT_S)
    if status is None:
        sys.stderr.write(place.log.read_text(errors="replace")[-_TAIL:])
        sys.stderr.write(f"error: the import server did not come up; {place.log} has what it said\n")
        return 1
    first = "import server started" if lock is not None else "an import server runs already"
    return _print(arguments, status, f"{first}: {_line(status)}")


def _spawn(place: Place, lock: int, idle_s: float) -> None:
    with _listening(place) as listener, place.log.open("ab") as log:
        files = (listener.fileno(), lock)
        command = [sys.executable, "-m", "orchestrator.zygote", "serve", f"--idle-s={idle_s:g}"]
        command += [f"--listener={files[0]}", f"--lock={lock}", f"--socket={place.socket}"]
        subprocess.Popen(
            command, pass_fds=files, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    os.close(lock)


def _serve(arguments: argparse.Namespace) -> int:
    from orchestrator.zygote.ending import LastExit
    from orchestrator.zygote.warm import AT_IMPORT

    last_exit = LastExit()
    environment = dict(os.environ)
    if arguments.listener is None:
        place = place_of(environment)
        lock = _lock(place)
        if lock is None:
            raise UserError("an import server of this environment runs already; python -m orchestrator.zygote status")
        listener = _listening(place)
    else:
        place, lock = Place(arguments.socket), arguments.lock
        listener = socket.socket(fileno=arguments.listener)
        listener.set_inheritable(False)
        os.set_inheritable(lock, False)
    for name, value in AT_IMPORT.items():
        os.environ.setdefault(name, value)
    from orchestrator.zygote.server import Server

    server = Server(place, listener, lock, environment, idle_s=arguments.idle_s, learns=not arguments.learns_nothing)
    job = server.serve()
    if job is None:
        return 0
    from orchestrator.zygote import child

    last_exit.code = child.run(job)
    return last_exit.code


def _status(arguments: argparse.Namespace) -> int:
    status = ask(place_of(os.environ), "status")
    if status is None:
        return _print(arguments, None, "no import server runs for this Python and environment", code=1)
    lines = [
        _line(status),
        *(f"{each['pid']}  {each['s']:.1f} s  {' '.join(each['arguments'])}" for each in status["running"]),
    ]
    return _print(arguments, status, "\n".join(lines))


def _stop(arguments: argparse.Namespace) -> int:
    answer = ask(place_of(os.environ), "stop")
    if answer is None:
        return _print(arguments, None, "no import server runs for this Python and environment")
    running = f"; {answer['running']} starts run on, then it ends" if answer["running"] else ""
    return _print(arguments, answer, f"import server {answer['pid']} stops{running}")


def _print(arguments: argparse.Namespace, shown: Any, text: str, code: int = 0) -> int:
    if sys.stdout is not None:
        sys.stdout.write((json.dumps(shown, indent=1) if arguments.json else text) + "\n")
    return code


def _line(status: dict[str, Any]) -> str:
    return (
        f"pid {status['pid']}, {status['modules']} modules imported in {status['import_s']:.1f} s, "
        f"{status['peak_bytes'] / 2**20:.0f} MiB, {status['starts']} starts, {len(status['running'])} running"
    )


def _lock(place: Place) -> int | None:
    """A descriptor that holds the lock until its last copy is closed; None if another process does."""
    descriptor = os.open(place.lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _listening(place: Place) -> socket.socket:
    """With the lock held: what lies there is the socket of a server that has died."""
    place.socket.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place.socket))
    listener.listen()
    return listener


def _fill_standard_descriptors() -> None:
    """What of 0 to 2 is closed would be given to the first file or socket that is opened, and that would become the
    input or output of a start."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m orchestrator.zygote",
        description="The import server: a process that has imported what starts need, without a CUDA context. Starts "
        "are forked from it, one after the other or side by side. There is one for each Python and environment.",
    )
    common = Parser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON")
    idle = Parser(add_help=False)
    idle.add_argument(
        "--idle-s", type=seconds_or_none, default=_IDLE_S, metavar="SECONDS",
        help=f"end after so long without a start; 0: never (default: {_IDLE_S:g})",
    )  # fmt: skip
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("start", parents=[common, idle], help="start it, and wait until it is ready").set_defaults(
        act=_start
    )
    commands.add_parser("run", help="a start from it: what follows is as for python -m orchestrator", add_help=False)
    commands.add_parser("status", parents=[common], help="whether it runs, and what runs from it").set_defaults(
        act=_status
    )
    commands.add_parser("stop", parents=[common], help="end it; starts under way run on").set_defaults(act=_stop)
    serve = commands.add_parser("serve", parents=[idle], help="be the server, in the foreground")
    serve.add_argument("--listener", type=int, help=argparse.SUPPRESS)
    serve.add_argument("--lock", type=int, help=argparse.SUPPRESS)
    serve.add_argument("--socket", type=Path, help=argparse.SUPPRESS)
    serve.add_argument("--learns-nothing", action="store_true", help=argparse.SUPPRESS)
    serve.set_defaults(act=_serve)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
