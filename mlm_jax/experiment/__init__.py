"""Experiments: from a file with a question to a report. Imports no jax."""
