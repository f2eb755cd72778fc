"""Masked language modeling in JAX."""
