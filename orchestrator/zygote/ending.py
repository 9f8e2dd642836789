"""The end of a forked process."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from contextlib import suppress


class LastExit:
    """Ends a forked process at the end of its exit, before the interpreter is taken apart: that would touch, and so
    copy, every page that it shares with the server. Everything that registered its own end has had it by then.

    To be made before anything else registers: the last to register is the first to be called.
    """

    def __init__(self) -> None:
        self._server_pid = os.getpid()
        self.code = 1
        """Of the process; 1 is what an exception that nobody caught means."""
        atexit.register(self._leave)

    def _leave(self) -> None:
        if os.getpid() == self._server_pid:
            return
        for stream in (sys.stdout, sys.stderr):
            # As at any other exit, where a reader that is gone is no error of the start's.
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        ctypes.CDLL(None).fflush(None)
        os._exit(self.code)
