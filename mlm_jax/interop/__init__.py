"""Masked-LM checkpoints as Hugging Face keeps them. Imports no jax."""
