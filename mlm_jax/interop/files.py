"""The files of a Hugging Face folder: config.json, and tensors as safetensors only.

The one place that knows the safetensors library, which checks a file's header (its
size, each tensor's dtype and shape, that the data lie within the file, in order and
without gaps) before anything is read.
"""

import contextlib
import json

import numpy as np
import safetensors
from safetensors.numpy import save_file

from mlm_jax.errors import InputError
from mlm_jax.files import write_text

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Pickles, by their first bytes or not, can run any code, and are never opened.
PICKLES = "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack"
DTYPES = "F64", "F32", "F16", "BF16"
MAX_JSON = 64 << 20


def read_json(path):
    """Returns an object. Raises InputError where there is none."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise InputError(f"{path} is larger than {MAX_JSON:,} bytes.")
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} holds no JSON object.")
    return found


class Tensors:
    """The tensors of a folder, opened and not yet read.

    `shapes` is {name: shape}, with the names that older TensorFlow checkpoints gave to
    the scale and bias of a norm changed to `weight` and `bias`. `dtypes` are those of
    floating-point tensors.

    Raises InputError, naming the file, for anything but whole safetensors.
    """

    def __init__(self, folder):
        self._stack = contextlib.ExitStack()
        self._where: dict = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        for path in _weight_files(folder):
            self._open(path)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._stack.close()

    def _open(self, path):
        try:
            file = self._stack.enter_context(safetensors.safe_open(path, "np"))
            for name in file.keys():  # noqa: SIM118 (no mapping)
                known = _modern(name)
                view = file.get_slice(name)
                self._dtypes[known] = view.get_dtype()
                if known in self._where:
                    raise InputError(f"{path} has {known} twice.")
                self._where[known] = file, name
                self.shapes[known] = tuple(view.get_shape())
        except (OSError, safetensors.SafetensorError) as error:
            raise InputError(f"{path} is not whole safetensors: {error}") from error

    @property
    def dtypes(self):
        return sorted(set(self._dtypes.values()).intersection(DTYPES))

    def read(self, name):
        """Returns a tensor. Raises InputError if it is not of finite numbers."""
        if self._dtypes[name] not in DTYPES:
            raise InputError(
                f"{name} is {self._dtypes[name]}; expected one of {', '.join(DTYPES)}."
            )
        file, stored = self._where[name]
        tensor = file.get_tensor(stored)
        if not np.isfinite(tensor).all():
            raise InputError(f"{name} has values that are not finite.")
        return tensor


def _modern(name):
    module, _, leaf = name.rpartition(".")
    leaf = {"gamma": "weight", "beta": "bias"}.get(leaf, leaf)
    return f"{module}.{leaf}" if module else leaf


def _weight_files(folder):
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        names = read_json(folder / INDEX).get("weight_map")
        names = sorted(set(names.values())) if isinstance(names, dict) else []
        if not names or any("/" in n or not n.endswith(".safetensors") for n in names):
            raise InputError(f"{folder / INDEX} names no safetensors beside it.")
        return [folder / name for name in names]
    for pattern in PICKLES:
        for path in folder.glob(pattern):
            raise InputError(
                f"{path}: only safetensors are read, since such a file may run code. "
                "Where it is trusted, transformers converts it: "
                "AutoModelForMaskedLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
            )
    raise InputError(f"{folder} has no {WEIGHTS}.")


def write(folder, theirs, tensors):
    """Writes `model.safetensors`, and `config.json` when it is whole."""
    temporary = folder / f".{WEIGHTS}.tmp"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.replace(folder / WEIGHTS)
    text = json.dumps(theirs, indent=2, sort_keys=True) + "\n"
    write_text(folder / "config.json", text)
