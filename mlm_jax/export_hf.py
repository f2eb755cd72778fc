"""Writes a run as a Hugging Face checkpoint, which transformers loads.

    python -m mlm_jax.export_hf --workdir=runs/bert_base --to=exported/bert_base

Makes `config.json`, `model.safetensors`, `tokenizer.json` and `tokenizer_config.json`
of the newest checkpoint, for `AutoModelForMaskedLM.from_pretrained` and
`AutoTokenizer.from_pretrained`. A run whose model none of the known families computes
is refused, naming the field.
"""

import json
import pathlib

import numpy as np
from absl import flags
from flax import traverse_util

from mlm_jax import checkpoint, command, config
from mlm_jax.data import hugging_face
from mlm_jax.data.tokenizer import Tokenizer
from mlm_jax.errors import InputError
from mlm_jax.import_hf import IMPORTED
from mlm_jax.interop import families, files, tensors

WORKDIR = command.define_workdir("the model to export")
TO = flags.DEFINE_string("to", None, "Folder to write, new or empty.")
MODEL_TYPE = flags.DEFINE_enum(
    "model_type",
    None,
    list(families.FAMILIES),
    "By default what the run was imported as, or the one that computes the same.",
)


def run(directory, folder, *, model_type=None):
    """Writes the folder; raises InputError where that cannot be."""
    directory, folder = pathlib.Path(directory), pathlib.Path(folder)
    c = config.load(directory)
    if not c.model.head:
        raise InputError(
            f"{directory}: config.model.head = False, so there is no masked LM to "
            "export."
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"--to={folder} is there already; give a new or empty folder.")
    tokenizer = Tokenizer.load(directory / "tokenizer.json")
    model_type = model_type or _imported_as(directory) or families.default_type(c.model)
    model = c.model.to_dict()
    model["max_length"] = c.model.max_length or c.data.row_length
    theirs = families.to_theirs(
        model,
        model_type=model_type,
        special=tokenizer.special,
        vocab_size=tokenizer.vocab_size,
    )
    step, state = checkpoint.restore_latest(directory)
    layout = tensors.Layout(
        model_type=model_type,
        num_rows=tokenizer.vocab_size,
        vocab_size=tokenizer.vocab_size,
        pad_id=tokenizer.special.pad,
        tied=c.model.tied,
    )
    params = traverse_util.flatten_dict(state["params"], sep="/")
    written = tensors.to_theirs(layout, params)
    if layout.family.type_rows and not c.model.token_types:
        shape = theirs["type_vocab_size"], c.model.width
        name = f"{layout.name('encoder/type_embed')}.weight"
        written[name] = np.zeros(shape, np.float32)
    for copy, name in () if c.model.tied else layout.copies().items():
        written[copy] = written[name].copy()
    folder.mkdir(parents=True, exist_ok=True)
    hugging_face.write_tokenizer(
        tokenizer,
        folder,
        max_length=model["max_length"],
        input_names=layout.family.input_names,
    )
    files.write(folder, theirs, written)
    print(
        f"{directory}, step {step:,}: {theirs['architectures'][0]} of {len(written)} "
        f"tensors in {folder}"
    )


def _imported_as(directory):
    path = directory / IMPORTED
    return json.loads(path.read_bytes())["model_type"] if path.exists() else None


def main(arguments):
    del arguments
    if not TO.value:
        raise InputError("--to=DIR is missing, such as --to=exported.")
    run(WORKDIR.value, TO.value, model_type=MODEL_TYPE.value)


if __name__ == "__main__":
    command.run(main)
