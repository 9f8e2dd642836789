"""Importing this takes long enough for a signal to come."""

from __future__ import annotations

import signal

signal.raise_signal(signal.SIGINT)
