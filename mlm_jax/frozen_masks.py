"""The exam: held-out rows with some of their tokens hidden, once and for all.

Which ones depends on the rows, the strategy, the rate and the config's `eval` section,
not on the run. They are kept under `data.cache_dir`, beside the rows that they belong
to, in a file named by all of this. Their hash is that which training logs.
"""

import hashlib
import io
import os
import pathlib
import zipfile
import zlib
from typing import NamedTuple

import jax
import numpy as np

from mlm_jax import keys, program
from mlm_jax.corruption import collocations, policy
from mlm_jax.data import pipeline
from mlm_jax.errors import InputError
from mlm_jax.files import name_of, write_bytes

ROWS = 64  # at a time, while masks are made
DAMAGED = zipfile.BadZipFile, zlib.error
# As in a batch; the last four are what is hidden.
FIELDS = (
    *("tokens", "segment", "position", "word_start", "row"),
    *("inputs", "predict", "targets", "weights"),
)


class Masks(NamedTuple):
    """N rows; `rows` has arrays [N, …] as `pipeline` and `policy` name them."""

    strategy: str
    rate: float
    mask_hash: int
    rows: dict[str, np.ndarray]


def masks(c, store, *, strategy, rate, num_rows=None, collocations_file=None):
    """Returns the `Masks` of the held-out rows of `store`, found or made.

    `num_rows` is by default `c.eval.num_rows`, and 0 is all. Raises InputError for a
    file that is not what was written.
    """
    num_rows = c.eval.num_rows if num_rows is None else num_rows
    found, digest = None, None
    if strategy == "pmi":
        found = collocations.load(collocations_file, store.tokenizer)
        data = pathlib.Path(collocations_file).read_bytes()
        digest = hashlib.sha256(data).hexdigest()
    name = name_of(
        {
            "data": store.fingerprint,
            "eval": [c.eval.seed, c.eval.mask_frac, c.eval.random_frac],
            "num_rows": num_rows,
            "strategy": [strategy, digest],
            "rate": rate,
        }
    )
    cache = pathlib.Path(os.path.expanduser(c.data.cache_dir))
    path = cache / "masks" / f"{name}.npz"
    if not path.exists():
        rows, mask_hash = _make(c, store, strategy, rate, num_rows, found)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, mask_hash=np.uint32(mask_hash), **rows)
        write_bytes(path, buffer.getvalue())
    return Masks(strategy, rate, *_load(path))


def _make(c, store, strategy, rate, num_rows, found):
    corrupt = jax.jit(program.eval_corrupt(c, store.tokenizer, rate, strategy, found))
    key = keys.purpose_key(jax.random.key(c.eval.seed), keys.Purpose.CORRUPTION)
    hparams = program.eval_hparams(c, rate, strategy)
    made, mask_hash = [], 0
    batches = pipeline.eval_batches(
        store.validation,
        num_rows=num_rows,
        batch_size=ROWS,
        pad_id=store.tokenizer.special.pad,
    )
    for k in range(len(batches)):
        batch = batches[k]
        corrupted, ledger = jax.device_get(corrupt(key, batch, hparams, np.float32(0)))
        made.append({name: corrupted[name][batch["row"] >= 0] for name in FIELDS})
        mask_hash += int(ledger["mask_hash"])
    rows = {name: np.concatenate([part[name] for part in made]) for name in FIELDS}
    return rows, mask_hash % 2**32


def _load(path):
    """Returns the hash, verified, and the rows."""
    try:
        # Opened here: of what is no archive NumPy would leave it open.
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            mask_hash = int(file["mask_hash"])
            rows = {name: file[name] for name in FIELDS}
        hidden_BxL = np.zeros(rows["inputs"].shape, np.int32)
        slots = np.nonzero(rows["weights"] > 0)
        hidden_BxL[slots[0], rows["predict"][slots]] = 1
        batch = {"row": rows["row"]}
        found = int(policy.mask_hash(batch, rows["inputs"], hidden_BxL))
        if found != mask_hash:
            raise ValueError(f"masks of hash {found}, not {mask_hash}")
    except (OSError, EOFError, ValueError, KeyError, IndexError, *DAMAGED) as error:
        raise InputError(
            f"{path} is not as it was written ({error}); remove it, and the same masks "
            "are made anew."
        ) from error
    return mask_hash, rows
