"""All numbers that the walkthrough tells, gathered once."""

from typing import NamedTuple

import numpy as np

from mlm_jax.explaining import facts, subjects
from mlm_jax.explaining.facts import Draw, Guesses, guesses_at, guesses_of_scores

RATES = (0.15, 0.4, 0.8)  # of the words hidden, each set a part of the next
WORKED = {"close": (2, 1, 0), "tie": (0, 0, 0), "runaway": (10, 1, 0)}


class Story(NamedTuple):
    subject: facts.Subject
    places: list[int]  # of the masks; the first is followed
    words: list[str]  # of the text
    guesses: Guesses
    contexts: list[tuple[str, np.ndarray, Guesses]]  # (of what, tokens, guesses)
    before_TxD: np.ndarray
    after_TxD: np.ndarray
    influence_T: np.ndarray
    worked: dict[str, Guesses]
    draws: list[Draw]  # at more and more hidden words
    cases: list[facts.Case]
    counts: dict[facts.Action, int]

    @property
    def place(self):
        return self.places[0]

    @property
    def truth(self):
        """The guess that is taken to be true."""
        return self.guesses.best[0]


def gather(subject):
    tokens_T, tokenizer = subject.tokens_T, subject.tokenizer
    places = np.flatnonzero(tokens_T == tokenizer.special.mask).tolist()
    place = places[0]
    alone_T = facts.without_context(subject)
    contexts = [("this text", tokens_T), ("every word hidden", alone_T)]
    worked = {
        name: guesses_of_scores(subjects.CLASSES, scores)
        for name, scores in WORKED.items()
    }
    if subject.is_example:
        contexts.insert(1, ("another text", subject.encode(subjects.OTHER)))
        losses = [found.best[0].loss for found in worked.values()]
        names = [", ".join(map(str, scores)) for scores in WORKED.values()]
        draws = [Draw(names[:n], losses[:n]) for n in (1, 2, 3)]
    else:
        draws = facts.draw(subject, RATES)
    return Story(
        subject=subject,
        places=places,
        words=facts.spell_all(tokenizer, tokens_T),
        guesses=guesses_at(subject, tokens_T, place),
        contexts=[
            (name, x_T, guesses_at(subject, x_T, place)) for name, x_T in contexts
        ],
        before_TxD=subject.embed(tokens_T),
        after_TxD=subject.states(tokens_T[None])[0],
        influence_T=facts.influences(subject, place),
        worked=worked,
        draws=draws,
        cases=facts.cases(subject, place),
        counts=facts.count_actions(subject),
    )
