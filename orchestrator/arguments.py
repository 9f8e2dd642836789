"""What the command lines have in common."""

from __future__ import annotations

import argparse
import math
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Says a mistake in one line, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; --help shows what there is\n")


def positive_seconds(text: str) -> float:
    """
    Raises:
        ArgumentTypeError: not a number above 0.
    """
    seconds = _number(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be a number above 0")
    return seconds


def seconds_or_none(text: str) -> float:
    """
    Raises:
        ArgumentTypeError: not a number of 0, which means without a limit, or more.
    """
    seconds = _number(text)
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be a number of 0 or more")
    return seconds


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
