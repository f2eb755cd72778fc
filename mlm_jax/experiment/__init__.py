"""Sweeps over many runs, and what they show; imports no jax."""
