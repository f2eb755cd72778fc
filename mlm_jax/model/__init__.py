"""The encoder and its head. The only package that knows Linen."""
