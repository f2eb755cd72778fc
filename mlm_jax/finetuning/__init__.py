"""A trained encoder with a new head, trained on a task."""
