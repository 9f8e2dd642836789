"""Repeat a recorded run, and say what was different before and what came out differently."""
