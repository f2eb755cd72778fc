"""A look at the files in which TFDS names classes, before it imports them."""

import json
import pathlib
import sys

from mlm_jax.errors import InputError

KEYS = ("pythonClassName", "python_class_name", "type")


def refuse_foreign_classes(folder: str | pathlib.Path) -> None:
    """Looks into every `features.json` in and below `folder`.

    TFDS imports the module of each class named there, and importing is running it.

    Raises:
      InputError: for a class that is neither TFDS's nor of an imported module, and for
        a file that cannot be read.
    """
    for path in sorted(pathlib.Path(folder).rglob("features.json")):
        try:
            pending = [json.loads(path.read_bytes())]
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{path} cannot be read: {error}") from error
        while pending:
            value = pending.pop()
            if isinstance(value, list):
                pending += value
            elif isinstance(value, dict):
                pending += value.values()
                _check(path, [value[key] for key in KEYS if key in value])


def _check(path: pathlib.Path, names: list) -> None:
    for name in names:
        module = str(name).rpartition(".")[0]
        is_known = module.startswith("tensorflow_datasets.") or module in sys.modules
        if module and not is_known:
            raise InputError(
                f"{path} names {name}, a class that would have to be imported; import "
                "it yourself if it is yours."
            )
