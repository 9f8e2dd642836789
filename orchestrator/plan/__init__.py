"""`python -m orchestrator.plan`: what fits where, the largest value that fits, and the same for other engines."""
