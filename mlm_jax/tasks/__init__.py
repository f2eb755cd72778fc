"""What a trained encoder is used for."""
