"""The smallest complete plugin: one stage, one YAML, one test."""
