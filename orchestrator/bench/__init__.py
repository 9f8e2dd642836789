"""Whole starts in new processes, repeated and timed, beside bare imports and another engine's starts."""
