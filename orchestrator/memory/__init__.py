"""Arithmetic over bytes: readings, accounts, budgets. Knows nothing of models."""
