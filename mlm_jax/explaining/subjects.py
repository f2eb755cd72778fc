"""The two subjects of the walkthrough: an example of three words, and a trained run."""

import functools
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from mlm_jax.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from mlm_jax.explaining.facts import spell
from mlm_jax.model.attention import attend
from mlm_jax.tasks.reader import Pieces, Rows

# Vectors of two numbers, so that they can be drawn, and such that the hidden word of
# the first sentence scores 2, 1, 0.
CLASSES = ("mat", "car", "sky")
SENTENCE = "the cat sat on the [MASK]"
OTHER = "the bird flew in the [MASK]"
VECTORS = {
    "mat": (1, 0),
    "car": (0, 1),
    "sky": (-1, 2),
    "the": (1, 0.5),
    "cat": (4, 3),
    "sat": (4, 1),
    "on": (2, 1),
    "bird": (-4, 2),
    "flew": (-4, 2),
    "in": (0, 1),
    "[MASK]": (0, 0),
}


class Example:
    """Three words, vectors by hand, and attention that looks everywhere alike."""

    source = "an example of three words, whose vectors were chosen by hand"
    is_example = True
    position = "none"  # the order of the words makes no difference
    mask_frac, random_frac = 0.8, 0.1  # Devlin et al. 2019

    def __init__(self):
        self.tokenizer = _tokenizer_of(VECTORS)
        self._vectors_VxD = np.zeros((self.tokenizer.vocab_size, 2), np.float32)
        for word, vector in VECTORS.items():
            self._vectors_VxD[self.token(word)] = vector
        self.tokens_T = self.encode(SENTENCE)
        self._class_ids = np.array([self.token(word) for word in CLASSES])
        is_mask_T = self.tokens_T == self.tokenizer.special.mask
        self.truth_T = np.where(is_mask_T, self._class_ids[0], self.tokens_T)
        self.num_classes = len(CLASSES)

    def encode(self, text):
        return self.tokenizer.encode_with_masks(text).tokens

    def token(self, word):
        (token,) = self.encode(word)
        return token

    def embed(self, tokens_T):
        return self._vectors_VxD[tokens_T]

    def states(self, tokens_BxT):
        x_BxTx1xD = jnp.asarray(self.embed(np.asarray(tokens_BxT)))[:, :, None]
        query = jnp.zeros_like(x_BxTx1xD)  # equal scores, so equal weights
        mask = jnp.ones((1, 1, 1, 1), bool)
        return np.asarray(attend(query, x_BxTx1xD, x_BxTx1xD, mask, lambda w: w))[
            :, :, 0
        ]

    def hidden(self, tokens_BxT, predict_BxM):
        x_BxTxD = jnp.asarray(self.states(tokens_BxT))
        hidden_BxMxD = jnp.take_along_axis(x_BxTxD, predict_BxM[:, :, None], axis=1)
        table_VxD = jnp.asarray(self._vectors_VxD[self._class_ids])
        return hidden_BxMxD, table_VxD, jnp.zeros(self.num_classes)

    def best(self, tokens_T, place):
        del tokens_T, place
        return list(range(self.num_classes))

    def class_of(self, tokens):
        is_class = self._class_ids[None] == np.asarray(tokens)[:, None]
        return np.where(is_class.any(1), is_class.argmax(1), -1)

    def class_name(self, id_):
        return CLASSES[id_]


def _tokenizer_of(words):
    """Returns the tokenizer whose vocabulary is the special tokens and `words`."""
    entries = dict.fromkeys([*SPECIAL_TOKENS, *words])
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "vocab.txt"
        path.write_text("\n".join(entries))
        return Tokenizer.from_file(path, lowercase=True, strip_accents=True)


class Run:
    """A `trained.Trained` and a text with [MASK]s, each filled by its best guess where
    something has to be true."""

    is_example = False

    def __init__(self, trained, text, top=5):
        self._trained = trained
        self.source = f"{trained.workdir}, step {trained.step:,}"
        self.tokenizer = trained.tokenizer
        self.num_classes = self.tokenizer.vocab_size
        self.mask_frac = trained.config.corruption.mask_frac
        self.random_frac = trained.config.corruption.random_frac
        self.position = trained.config.model.position
        self._top = min(top, self.num_classes)
        trained.fill_mask(text, top=self._top)  # refuses what cannot be filled
        encoded = self.tokenizer.encode_with_masks(text)
        self.tokens_T = trained.reader.frame(encoded.tokens)
        self.truth_T = self.tokens_T.copy()
        for place in np.flatnonzero(self.tokens_T == self.tokenizer.special.mask):
            self.truth_T[place] = self.best(self.tokens_T, place)[0]

    def embed(self, tokens_T):
        _, table_VxD, _ = self.hidden(tokens_T[None], np.zeros((1, 1), np.int32))
        return np.asarray(table_VxD, np.float32)[tokens_T]

    def states(self, tokens_BxT):
        return np.asarray(self._states(self._trained.params, *_rows(tokens_BxT)))

    def hidden(self, tokens_BxT, predict_BxM):
        rows = _rows(tokens_BxT)
        return self._hidden(self._trained.params, *rows, jnp.asarray(predict_BxM))

    @functools.cached_property
    def _states(self):
        def states(params, *rows):
            x_BxTxD = self._trained.model.apply(
                {"params": params},
                *rows,
                method=lambda model, *row: model.encoder(*row),
            )
            return x_BxTxD.astype(jnp.float32)

        return jax.jit(states)

    @functools.cached_property
    def _hidden(self):
        model = self._trained.model
        return jax.jit(lambda params, *rows: model.apply({"params": params}, *rows))

    def best(self, tokens_T, place):
        """Without special tokens, which are never the truth."""
        rows = Rows([tokens_T], np.array([place]), np.array([Pieces.ANY]))
        is_special_V = self.tokenizer.is_special
        most = min(self._top + int(is_special_V.sum()), self.num_classes)
        ids_1xK, _ = self._trained.reader.best(rows, most)
        ordinary = [id_ for id_ in ids_1xK[0].tolist() if not is_special_V[id_]]
        return ordinary[: self._top]

    def class_of(self, tokens):
        return np.asarray(tokens)

    def class_name(self, id_):
        return spell(self.tokenizer, id_)


def _rows(tokens_BxT):
    tokens_BxT = jnp.asarray(tokens_BxT)
    position_BxT = jnp.broadcast_to(jnp.arange(tokens_BxT.shape[1]), tokens_BxT.shape)
    return tokens_BxT, jnp.ones_like(tokens_BxT), position_BxT
