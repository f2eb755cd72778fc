"""A trained run in Python: what its directory holds, and what that is used for.

import mlm_jax

austen = mlm_jax.load("runs/austen")
austen.fill_mask("Mr. Darcy [MASK] to Elizabeth.")
"""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import ml_collections
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mlm_jax import checkpoint, config, parallel, program
from mlm_jax.data.tokenizer import Tokenizer
from mlm_jax.model.head import MaskedLM
from mlm_jax.tasks import fill_mask, likelihood, minimal_pairs
from mlm_jax.tasks.reader import Reader


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run as it was after `step`. `params` are on every device of `mesh`."""

    workdir: pathlib.Path
    step: int
    config: ml_collections.ConfigDict
    tokenizer: Tokenizer
    model: MaskedLM
    params: dict[str, Any]
    mesh: jax.sharding.Mesh

    @functools.cached_property
    def reader(self):
        """What the model makes of texts; compiled when it is first needed."""
        return Reader(
            self.model,
            self.params,
            self.tokenizer,
            self.mesh,
            row_length=self.config.data.row_length,
        )

    def fill_mask(self, texts, **settings):
        """Returns what stands for each [MASK]; see `tasks.fill_mask.fill_mask`.

        Of one text, a string, the answer alone.
        """
        return self._each(texts, fill_mask.fill_mask, **settings)

    def pseudo_log_likelihood(self, texts, **settings):
        """Returns a `tasks.likelihood.Likelihood` for each text, or for the only one if
        `texts` is a string."""
        return self._each(texts, likelihood.pseudo_log_likelihood, **settings)

    def embed(self, texts, *, pooling="mean", tick=None):
        """Returns float32[N, D], a vector for each text, or float32[D] for a string;
        `pooling` is one of `tasks.reader.POOLINGS`."""
        if isinstance(texts, str):
            return self.embed([texts], pooling=pooling)[0]
        tokens = [self.reader.frame(t.tokens) for t in self.reader.encode(texts)]
        return self.reader.vectors(tokens, pooling, tick)

    def minimal_pairs(self, path, *, kind=likelihood.DEFAULT):
        """Returns ({paradigm: `tasks.minimal_pairs.Accuracy`}, that of all pairs) for a
        file or directory in BLiMP's form, or `bundled:agreement`."""
        pairs = minimal_pairs.read(path)
        encoded = minimal_pairs.encode(self.reader, pairs)
        judged = minimal_pairs.judge(self.reader, encoded, kind)
        return minimal_pairs.accuracies(pairs, judged)

    def evaluate(self, **settings):
        """Returns {"strategy@rate": figures} on held-out rows; see `exam.examine`."""
        from mlm_jax import exam  # reads data sets, which takes a second to import

        return exam.examine(self, **settings)

    def _each(self, texts, function, **settings):
        if isinstance(texts, str):
            return function(self.reader, [texts], **settings)[0]
        return function(self.reader, texts, **settings)


def load(workdir, step=None):
    """Returns the `Trained` of a run's directory, at its newest whole checkpoint or at
    that of `step`. Reads only, so it may be used beside a run that goes on.

    Raises InputError where there is no run, CheckpointError where it has no checkpoint
    to use, and DamageError if that of `step` is not what was saved.
    """
    workdir = pathlib.Path(workdir)
    c = config.load(workdir)
    tokenizer = Tokenizer.load(workdir / "tokenizer.json")
    if step is None:
        step, state = checkpoint.restore_latest(workdir)
    else:
        step, state = checkpoint.restore_step(workdir, step)
    mesh = parallel.make_mesh({"data": jax.local_device_count()}, jax.local_devices())
    platform = mesh.devices.flat[0].platform
    return Trained(
        workdir=workdir,
        step=step,
        config=c,
        tokenizer=tokenizer,
        model=program.model_of(c, tokenizer.vocab_size, platform),
        params=jax.device_put(state["params"], NamedSharding(mesh, P())),
        mesh=mesh,
    )
