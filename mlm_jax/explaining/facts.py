"""The numbers of the walkthrough, each made by the function that a training step uses.

A subject is what they are the numbers of: the three-word example, or a trained run.
"""

import unicodedata
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from mlm_jax import loss_xla
from mlm_jax.corruption import policy, replace, settings
from mlm_jax.corruption.replace import Action
from mlm_jax.loss import masked_cross_entropy

DRAWS = 10_000  # hidden places, over which the three replacements are counted
SEED = 0


class Subject(Protocol):
    """Who guesses, and at which text.

    `tokens_T` is the text with its masks, `truth_T` the same with the words that are
    taken to be true. Classes are what may stand at a mask: `class_of` maps tokens to
    them, -1 for a token that is none.
    """

    source: str
    is_example: bool
    tokenizer: object
    tokens_T: np.ndarray
    truth_T: np.ndarray
    num_classes: int
    mask_frac: float
    random_frac: float
    position: str  # how places are told apart, as the config has it

    def embed(self, tokens_T): ...  # float[T, D], before any context
    def states(self, tokens_BxT): ...  # float[B, T, D], after it
    def hidden(self, tokens_BxT, predict_BxM): ...  # hidden, table, bias of the loss
    def best(self, tokens_T, place): ...  # classes, best first
    def class_of(self, tokens): ...
    def class_name(self, id_): ...


class Guess(NamedTuple):
    """What one class gets at a hidden place."""

    word: str
    id: int
    vector_D: np.ndarray
    score: float  # vector @ hidden + bias
    bias: float
    loss: float  # -log p, in nats

    @property
    def power(self):
        return float(np.exp(np.float64(self.score)))


class Guesses(NamedTuple):
    """The best classes at a place, and what all classes have together."""

    hidden_D: np.ndarray
    best: list[Guess]
    num_classes: int

    @property
    def total(self):
        """The sum of exp(score) over all classes: log of it is score - log p."""
        first = self.best[0]
        return float(np.exp(np.float64(first.score) + first.loss))

    @property
    def rest(self):
        """The share of the classes that are not among the best."""
        return max(0.0, 1 - sum(np.exp(-guess.loss) for guess in self.best))


def guesses(names, ids_K, hidden_D, table_VxD, bias_V, num_classes):
    """Returns the `Guesses` of classes `ids_K`: each once as if it were the target."""
    ids_K = jnp.asarray(ids_K, jnp.int32)
    hidden_KxD = jnp.tile(hidden_D, (len(ids_K), 1))
    _, predictions = masked_cross_entropy(
        hidden_KxD,
        table_VxD,
        bias_V,
        ids_K,
        jnp.ones(len(ids_K)),
        num_classes=num_classes,
    )
    table_VxD = table_VxD[:num_classes].astype(hidden_D.dtype)
    scores, _ = loss_xla.score(hidden_KxD, ids_K, table_VxD, bias_V[:num_classes])
    _, _, score_K, _ = scores
    fields = jax.device_get(
        (table_VxD[ids_K], score_K, bias_V[ids_K], predictions.losses_N)
    )
    vector_KxD, *numbers = (np.asarray(x, np.float64) for x in fields)
    columns = zip(names, ids_K.tolist(), vector_KxD, *map(_floats, numbers))  # noqa: B905
    best = [Guess(*column) for column in columns]
    return Guesses(np.asarray(hidden_D, np.float64), best, num_classes)


def _floats(x_K):
    return [float(x) for x in x_K]


def guesses_of_scores(names, scores):
    """Returns the `Guesses` of given scores: those of a table of ones and zeros."""
    scores_D = jnp.asarray(scores, jnp.float32)
    ids = range(len(names))
    return guesses(
        names, ids, scores_D, jnp.eye(len(names)), jnp.zeros(len(names)), len(names)
    )


def guesses_at(subject, tokens_T, place):
    """Returns the `Guesses` at one place of a text."""
    predict = np.array([[place]], np.int32)
    hidden_BxMxD, table_VxD, bias_V = subject.hidden(tokens_T[None], predict)
    ids_K = subject.best(tokens_T, place)
    names = [subject.class_name(id_) for id_ in ids_K]
    return guesses(
        names, ids_K, hidden_BxMxD[0, 0], table_VxD, bias_V, subject.num_classes
    )


def influences(subject, place):
    """Returns float64[T]: how far the vector at `place` moves, in parts of its length,
    when each place of the text is hidden too; 0 where that changes nothing."""
    tokens_T, mask = subject.tokens_T, subject.tokenizer.special.mask
    others_TxT = np.tile(tokens_T, (len(tokens_T), 1))
    is_special_T = subject.tokenizer.is_special[tokens_T]
    others_TxT[np.diag(~is_special_T)] = mask
    states_BxD = subject.states(np.concatenate([tokens_T[None], others_TxT]))[:, place]
    moved_T = np.linalg.norm(states_BxD[1:] - states_BxD[0], axis=1)
    return moved_T / np.linalg.norm(states_BxD[0])


def without_context(subject):
    """Returns the text with every word hidden."""
    is_special_T = subject.tokenizer.is_special[subject.tokens_T]
    mask = subject.tokenizer.special.mask
    return np.where(is_special_T, subject.tokens_T, mask).astype(np.int32)


class Draw(NamedTuple):
    """Hidden places of a row, and the loss at each."""

    words: list[str]
    losses: list[float]

    @property
    def total(self):
        return float(np.sum(self.losses))

    @property
    def mean(self):
        return self.total / len(self.losses)


def draw(subject, rates):
    """Returns the `Draw` of the true text at each rate: what the policy hides of it,
    all of it behind [MASK], and what the model loses there."""
    corrupt = make_corrupt(subject, len(subject.truth_T))
    key = jax.random.key(SEED)
    draws = []
    for rate in rates:
        numbers = hparams(rate, 1.0, 0.0)
        batch, _ = jax.device_get(corrupt(key, batch_of(subject, 1), numbers, 0.0))
        is_used_M = batch["weights"][0] > 0
        predict_M = batch["predict"][0][is_used_M]
        draws.append(losses_at(subject, batch["inputs"], np.sort(predict_M)))
    return draws


def losses_at(subject, inputs_1xT, predict_M):
    """Returns the `Draw` of a row's places, given what stands in the row."""
    hidden_1xMxD, table_VxD, bias_V = subject.hidden(inputs_1xT, predict_M[None])
    targets_M = subject.truth_T[predict_M]
    _, predictions = masked_cross_entropy(
        hidden_1xMxD[0],
        table_VxD,
        bias_V,
        jnp.asarray(subject.class_of(targets_M)),
        jnp.ones(len(predict_M)),
        num_classes=subject.num_classes,
    )
    words = [spell(subject.tokenizer, token) for token in targets_M]
    return Draw(words, _floats(predictions.losses_N))


class Case(NamedTuple):
    """One of the three things that may stand at a hidden place."""

    action: Action
    inputs_T: np.ndarray
    seen: str
    target: str
    loss: float


def cases(subject, place):
    """Returns the `Case` of each action at one place of the true text."""
    tokens_T = jnp.asarray(subject.truth_T)
    is_hidden_T = jnp.arange(len(tokens_T)) == place
    found = []
    for number, action in enumerate((Action.MASK, Action.RANDOM, Action.KEEP)):
        inputs_T, action_T = replace.replace(
            jax.random.key(SEED),
            tokens_T,
            jnp.arange(len(tokens_T)),
            is_hidden_T,
            mask_frac=float(number == 0),
            random_frac=float(number == 1),
            per_unit=False,
            mask_id=subject.tokenizer.special.mask,
            thresholds_V=replace.non_special(subject.tokenizer.is_special, None),
        )
        inputs_T = np.asarray(inputs_T)
        assert action_T[place] == action
        (loss,) = losses_at(subject, inputs_T[None], np.array([place])).losses
        seen = spell(subject.tokenizer, inputs_T[place])
        target = spell(subject.tokenizer, subject.truth_T[place])
        found.append(Case(action, inputs_T, seen, target, loss))
    return found


def count_actions(subject):
    """Returns {Action: how often} over visits that hide at least `DRAWS` places."""
    corrupt = make_corrupt(subject, len(subject.truth_T))
    is_maskable_T = ~subject.tokenizer.is_special[subject.truth_T]
    visits = -(-DRAWS // int(is_maskable_T.sum()))
    numbers = hparams(1.0, subject.mask_frac, subject.random_frac)
    batch = batch_of(subject, visits)
    _, ledger = jax.device_get(corrupt(jax.random.key(SEED), batch, numbers, 0.0))
    return {
        Action.MASK: int(ledger["num_mask_tokens"]),
        Action.RANDOM: int(ledger["num_random_tokens"]),
        Action.KEEP: int(ledger["num_kept_tokens"]),
    }


def make_corrupt(subject, num_slots):
    """Returns the policy of single tokens, an exact count of them."""
    return jax.jit(
        policy.make_corrupt(
            strategy=settings.EXAM["strategy"],
            collocations=None,
            token_weights=settings.EXAM["token_weights"],
            count=settings.EXAM["count"],
            num_slots=num_slots,
            views=settings.EXAM["views"],
            random_pool=settings.EXAM["random_pool"],
            mask_id=subject.tokenizer.special.mask,
            is_special_V=subject.tokenizer.is_special,
            counts_V=None,
        )
    )


def hparams(rate, mask_frac, random_frac):
    fields = {"rate": rate, "mask_frac": mask_frac, "random_frac": random_frac}
    return settings.hparams(ml_collections.ConfigDict(settings.EXAM | fields))


def batch_of(subject, visits):
    """Returns the true text, `visits` times, each an epoch of its own."""
    tokens_BxT = np.tile(subject.truth_T, (visits, 1))
    return {
        "tokens": tokens_BxT,
        "segment": np.ones_like(tokens_BxT),
        "word_start": np.ones_like(tokens_BxT, bool),
        "row": np.zeros(visits, np.int32),
        "epoch": np.arange(visits, dtype=np.int32),
    }


def spell(tokenizer, token):
    """Returns the text of a piece, or its entry where that is no text; what a terminal
    or a picture could not show is replaced."""
    text = tokenizer.decode([token]).strip()
    if not text or "\ufffd" in text:
        text = tokenizer.piece(token)
    return "".join("\ufffd" if unicodedata.category(c)[0] == "C" else c for c in text)


def spell_all(tokenizer, tokens_T):
    return [spell(tokenizer, token) for token in tokens_T]
