"""Makes a run of a Hugging Face checkpoint: BERT, RoBERTa, DistilBERT or ModernBERT.

    python -m mlm_jax.import_hf --from=downloads/bert-base-uncased \
        --workdir=runs/bert_base

Reads `config.json`, `model.safetensors` (or its parts, by their index) and the
tokenizer (`tokenizer.json` or `vocab.txt`) of a local folder, and writes a workdir with
a checkpoint of step 0, which every other command takes. What is not known, missing, or
has no place in the model is refused by name. Trained further it is by
--config=configs/from_run.py:WORKDIR.
"""

import hashlib
import json
import pathlib
import re

import jax
import numpy as np
from absl import flags
from flax import traverse_util

from configs import base
from mlm_jax import checkpoint, command, config, optim, program, state, workdir
from mlm_jax.data import hugging_face
from mlm_jax.errors import InputError
from mlm_jax.files import write_text
from mlm_jax.interop import families, files, tensors

FROM = flags.DEFINE_string("from", None, "Folder with the files of the checkpoint.")
WORKDIR = command.define_workdir("to be made")
TOKENS_PER_ROW = flags.DEFINE_integer(
    "tokens_per_row", None, "By default all positions, up to 512."
)
LOWERCASE = flags.DEFINE_boolean(
    "lowercase", None, "Whether case is lost, for a vocab.txt that does not say so."
)
WITHOUT_HEAD = flags.DEFINE_boolean(
    "without_head", False, "Import an encoder alone, which cannot predict tokens."
)
IGNORE = flags.DEFINE_list(
    "ignore", [], "Beginnings of names of tensors to leave out, such as classifier."
)
IMPORTED = "imported.json"
DEFAULT_ROW_LENGTH = 512


def run(
    folder,
    directory,
    *,
    row_length=None,
    lowercase=None,
    without_head=False,
    ignored=(),
):
    """Writes the run. Raises InputError, naming file, field or tensor, for what cannot
    be imported, before anything is written."""
    folder, directory = pathlib.Path(folder), pathlib.Path(directory)
    theirs = files.read_json(folder / "config.json")
    settings = {}
    if (folder / "tokenizer_config.json").exists():
        settings = files.read_json(folder / "tokenizer_config.json")
    tokenizer = hugging_face.read_tokenizer(folder, settings, lowercase=lowercase)
    num_rows = _check_vocabulary(theirs, tokenizer, folder)
    with files.Tensors(folder) as found:
        layout = _layout(theirs, tokenizer, num_rows, found.shapes, folder)
        head = _has_head(layout, found.shapes, folder, without_head)
        c = _config(theirs, layout, found, head, row_length, folder)
        c.tokenizer.file = str(directory / "tokenizer.json")
        c.tokenizer.vocab_size = tokenizer.vocab_size
        config.check(c)
        shapes = _shapes(c, tokenizer)
        head_modules = [layout.family.modules[m] for m in ("transform/dense", "")]
        if without_head:
            ignored = *ignored, *(m.partition(".")[0] for m in head_modules)
        left_out = _check_tensors(layout, found, shapes, folder, ignored)
        params = tensors.to_ours(layout, shapes, _reader(layout, found))
        dtypes = found.dtypes
    with workdir.held(directory):
        if workdir.has_begun(directory):
            raise InputError(f"--workdir={directory} holds a run; give another one.")
        _write(c, directory, tokenizer, params)
        facts = _facts(folder, layout.model_type, left_out)
        write_text(directory / IMPORTED, json.dumps(facts, indent=2) + "\n")
        config.save(c, directory)
    _print(c, directory, tokenizer, layout, params, left_out, dtypes)


def _check_vocabulary(theirs, tokenizer, folder):
    """Returns the rows of their embedding; more than there are tokens is padding."""
    where = folder / "config.json"
    num_rows = theirs.get("vocab_size")
    if not isinstance(num_rows, int):
        raise InputError(f"{where}: vocab_size = {num_rows!r}; expected an integer.")
    if num_rows < tokenizer.vocab_size:
        raise InputError(
            f"{where}: vocab_size = {num_rows}; the tokenizer has "
            f"{tokenizer.vocab_size} entries."
        )
    pad_id = theirs.get("pad_token_id")
    if pad_id not in (None, tokenizer.special.pad):
        raise InputError(
            f"{where}: pad_token_id = {pad_id}; the tokenizer's is "
            f"{tokenizer.special.pad}."
        )
    return num_rows


def _layout(theirs, tokenizer, num_rows, found, folder):
    model_type, family = families.family_of(theirs, folder / "config.json")
    return tensors.Layout(
        model_type=model_type,
        num_rows=num_rows,
        vocab_size=tokenizer.vocab_size,
        pad_id=tokenizer.special.pad,
        tied=theirs.get("tie_word_embeddings", True),
        is_bare=not any(name.startswith(family.prefix) for name in found),
    )


def _has_head(layout, found, folder, without_head):
    name = f"{layout.family.modules['transform/dense']}.weight"
    if name not in found and not without_head:
        raise InputError(
            f"{folder} has no head for masked tokens ({name}): it is an encoder alone. "
            "--without_head imports it, to be used for embeddings and fine-tuning."
        )
    return not without_head


def _config(theirs, layout, found, head, row_length, folder):
    c, where = base.get_config(), folder / "config.json"
    try:
        model = families.to_ours(theirs, where=where, pad_id=layout.pad_id)
        c.model.update(model, head=head)
    except InputError:
        raise
    except (TypeError, ValueError, AttributeError) as error:  # "12" for 12
        raise InputError(f"{where}: {error}") from error
    if c.model.num_layers > len(found.shapes):
        raise InputError(
            f"{where}: {c.model.num_layers} layers; there are {len(found.shapes)} "
            "tensors."
        )
    name = f"{layout.name('encoder/type_embed')}.weight" if c.model.token_types else ""
    if name in found.shapes and not found.read(name).any():
        c.model.token_types = 0  # what adds nothing is left out
    c.data.row_length = row_length or min(DEFAULT_ROW_LENGTH, c.model.max_length)
    return c


def _shapes(c, tokenizer):
    """Returns {path: shape} of the parameters."""
    model = program.model_of(c, tokenizer.vocab_size)
    params = jax.eval_shape(
        lambda key: state.init_params(key, model, c.data.row_length), jax.random.key(0)
    )
    return {p: x.shape for p, x in traverse_util.flatten_dict(params, sep="/").items()}


def _check_tensors(layout, found, shapes, folder, ignored):
    copies = layout.copies()
    present = dict(found.shapes)
    for copy, name in copies.items():  # of two names either will do
        if layout.tied and copy in present and name not in present:
            present[name] = present[copy]
    expected = layout.tensors(shapes)
    zeros = _type_table(layout, shapes, present)
    left_out = tensors.check(
        present, expected, where=folder, copies=copies, ignored=(*ignored, *zeros)
    )
    for copy, name in copies.items() if layout.tied else ():
        if copy in found.shapes and name in found.shapes and name in expected:
            if not np.array_equal(found.read(copy), found.read(name)):
                raise InputError(
                    f"{folder}: {copy} is not {name}, though config.json says "
                    "tie_word_embeddings."
                )
    return [name for name in left_out if name not in zeros]


def _type_table(layout, shapes, present):
    """Returns the name of a table of token types that is left out, being zero."""
    if "encoder/type_embed/embedding" in shapes or not layout.family.type_rows:
        return ()
    name = f"{layout.name('encoder/type_embed')}.weight"
    return (name,) if name in present else ()


def _reader(layout, found):
    other_name = {name: copy for copy, name in layout.copies().items()}
    return lambda name: found.read(name if name in found.shapes else other_name[name])


def _write(c, directory, tokenizer, params):
    tokenizer.save(directory / "tokenizer.json")
    nested = traverse_util.unflatten_dict(params, sep="/")
    optimizer = optim.OPTIMIZERS[c.optim.name]
    first = state.first_state(
        jax.random.key(c.seed), config.hparams(c), nested, optimizer
    )
    with checkpoint.Checkpoints(directory, keep=1) as checkpoints:
        checkpoints.save(0, first)


def _facts(folder, model_type, left_out):
    names = re.compile(
        r"model.*\.safetensors|(tokenizer_)?config\.json|tokenizer\.json"
    )
    digests = {}
    for path in sorted(folder.iterdir()):
        if names.fullmatch(path.name) or path.name == "vocab.txt":
            with path.open("rb") as file:
                digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "from": str(folder.absolute()),
        "model_type": model_type,
        "left_out": left_out,
        "sha256": digests,
    }


def _print(c, directory, tokenizer, layout, params, left_out, dtypes):
    num_params = sum(array.size for array in params.values())
    print(
        f"{layout.model_type} with {c.model.num_layers} layers of width "
        f"{c.model.width}, {num_params:,} parameters ({', '.join(dtypes)}), vocabulary "
        f"{tokenizer.vocab_size:,}, rows of {c.data.row_length} tokens: {directory}"
    )
    if layout.num_rows > tokenizer.vocab_size:
        more = layout.num_rows - tokenizer.vocab_size
        print(f"rows of the vocabulary beyond the tokenizer's, left out: {more:,}")
    if left_out:
        print(f"tensors left out: {', '.join(left_out)}")
    if not c.model.head:
        print("no head: it can be used for embeddings and fine-tuning only")


def main(arguments):
    del arguments
    if not FROM.value:
        raise InputError("--from=DIR is missing, such as --from=bert-base-uncased.")
    run(
        FROM.value,
        WORKDIR.value,
        row_length=TOKENS_PER_ROW.value,
        lowercase=LOWERCASE.value,
        without_head=WITHOUT_HEAD.value,
        ignored=IGNORE.value,
    )


if __name__ == "__main__":
    command.run(main)
