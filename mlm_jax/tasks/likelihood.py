"""Pseudo-log-likelihood: how likely a masked model finds a text.

    PLL(w) = sum over the tokens t of log p(w_t | the text with some tokens hidden)

Which tokens are hidden for t tells the kinds apart; [CLS] and [SEP] are neither hidden
nor counted.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from mlm_jax.data.tokenizer import Encoded
from mlm_jax.tasks.reader import Rows

WINDOW = 1 << 14  # copies at a time, so that a corpus never is in memory as copies


def original(word_T):
    """The token alone (Salazar et al. 2020)."""
    return np.eye(len(word_T), dtype=bool)


def within_word_l2r(word_T):
    """The token and the later pieces of its word (Kauf & Ivanova 2023), which would
    tell most of it: long rare words looked likely."""
    return whole_word(word_T) & np.triu(np.ones((len(word_T),) * 2, bool))


def whole_word(word_T):
    """All pieces of the token's word (Kauf & Ivanova 2023)."""
    return word_T[:, None] == word_T[None]


# kind(number of each token's word) -> bool[T, T]: what is hidden for each token.
KINDS: dict[str, Callable] = {
    "within_word_l2r": within_word_l2r,
    "original": original,
    "whole_word": whole_word,
}
DEFAULT = "within_word_l2r"


class Likelihood(NamedTuple):
    """Of one text; in nats."""

    tokens_T: np.ndarray  # int32[T], without [CLS] and [SEP]
    log_p_T: np.ndarray  # float64[T]

    @property
    def pll(self) -> float:
        return float(self.log_p_T.sum())


def pseudo_log_likelihood(reader, texts, *, kind=DEFAULT) -> list[Likelihood]:
    """Returns the `Likelihood` of each text. Raises InputError for one that is longer
    than the model reads."""
    return list(likelihoods(reader, reader.encode(texts), kind))


def likelihoods(
    reader, encoded: Iterable[Encoded], kind=DEFAULT, tick=None
) -> Iterator[Likelihood]:
    """Yields the `Likelihood` of each text, in order, some thousands at a time.

    Texts of the same tokens are read once, and so are exactly as likely. `tick(n)` is
    told of every n tokens more that are done.
    """
    for window in _windows(encoded):
        # Two texts may have the same tokens and other words.
        keys = [tuple(x.tobytes() for x in text) for text in window]
        unique = dict(zip(keys, window, strict=True))
        copies = [masked_copies(reader, text, kind) for text in unique.values()]
        rows = Rows(
            [inputs_T for inputs_TxT, *_ in copies for inputs_T in inputs_TxT],
            *(np.concatenate(x) for x in list(zip(*copies, strict=True))[1:]),
        )
        log_p_N = reader.log_p(rows, tick) if rows.tokens else np.zeros(0)
        ends = np.cumsum([len(text.tokens) for text in unique.values()])
        by_key = dict(zip(unique, np.split(log_p_N, ends[:-1]), strict=True))
        if tick is not None:
            tick(sum(len(text.tokens) for text in window) - len(log_p_N))
        for key, text in zip(keys, window, strict=True):
            yield Likelihood(text.tokens, by_key[key])


def masked_copies(reader, text: Encoded, kind):
    """Returns a copy of the text for each of its tokens, hidden as `kind` says: tokens
    int32[T, T + 2], the places to predict int32[T], and what stands there."""
    framed_T = reader.frame(text.tokens)
    num = len(text.tokens)
    is_hidden_TxT = KINDS[kind](np.cumsum(text.word_start))
    inputs_TxT = np.repeat(framed_T[None], num, axis=0)
    inputs_TxT[:, 1:-1][is_hidden_TxT] = reader.tokenizer.special.mask
    return inputs_TxT, np.arange(1, num + 1, dtype=np.int32), text.tokens


def pseudo_perplexity(found: Iterable[Likelihood]) -> float:
    """Returns exp(-sum of PLL / sum of tokens) over a corpus (Salazar et al. 2020); NaN
    for no token at all."""
    total, count = 0.0, 0
    for likelihood in found:
        total, count = total + likelihood.pll, count + len(likelihood.tokens_T)
    return float(np.exp(-total / count)) if count else float("nan")


def _windows(encoded):
    window, num_copies = [], 0
    for text in encoded:
        window.append(text)
        num_copies += len(text.tokens)
        if num_copies >= WINDOW:
            yield window
            window, num_copies = [], 0
    if window:
        yield window
