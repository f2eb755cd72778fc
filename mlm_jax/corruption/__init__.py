"""Rows to inputs and targets, on the device, inside the step."""
