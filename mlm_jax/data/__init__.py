"""Text to rows to batches. Imports no jax."""
