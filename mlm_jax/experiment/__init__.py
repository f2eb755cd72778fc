<<<<<<< HEAD
"""Experiments: from a file with a question to a report. Imports no jax."""
=======
"""Sweeps over many runs, and what they show; imports no jax."""
>>>>>>> helper/report
