"""Text to token ids and back, with the start of every word.

Ordinary text never becomes a special token: `[MASK]` typed in a corpus is a bracket,
a word and a bracket. Only `encode_with_masks` reads it as the mask.
"""

import functools
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from mlm_jax.data import piece_text
from mlm_jax.errors import InputError
from mlm_jax.files import write_text

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# The names in given vocabularies; the first with all of theirs counts.
NAMES_OF_SPECIAL = SPECIAL_TOKENS, ("<pad>", "<unk>", "<s>", "</s>", "<mask>")


class SpecialIds(NamedTuple):
    pad: int
    unk: int
    cls: int
    sep: int
    mask: int


class Vocabulary:
    """As much of a tokenizer as a program needs: stands for one that is not trained."""

    special = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.is_special = np.arange(vocab_size) < len(self.special)


class Encoded(NamedTuple):
    tokens: np.ndarray  # int32[T]
    word_start: np.ndarray  # bool[T]


class Tokenizer:
    """A vocabulary with its five special tokens.

    Attributes:
      vocab_size: V, one more than the largest id.
      special: the ids of the five special tokens, looked up by name.
      is_special: bool[V], them and whatever else the vocabulary flags as special.
      digest: sha256 of the saved form.
    """

    def __init__(self, library: tokenizers.Tokenizer, *, name: str = "tokenizer"):
        vocabulary = library.get_vocab(with_added_tokens=True)
        names = _names_of_special(vocabulary, name)
        # An id of two billion would ask for as much memory; some files have gaps.
        if max(vocabulary.values()) >= 2 * len(vocabulary):
            raise InputError(
                f"{name} has ids up to {max(vocabulary.values())} for"
                f" {len(vocabulary)} entries"
            )
        library.no_padding()
        library.no_truncation()
        library.encode_special_tokens = True  # not a part of the saved form
        self._library = library
        self.vocab_size = max(vocabulary.values()) + 1
        self.special = SpecialIds(*(vocabulary[token] for token in names))
        self.is_special = np.zeros(self.vocab_size, bool)
        self.is_special[list(self.special)] = True
        for id_, token in library.get_added_tokens_decoder().items():
            self.is_special[id_] |= token.special
        self.digest = hashlib.sha256(self._json().encode()).hexdigest()

    @classmethod
    def train(
        cls,
        documents: Iterable[str],
        *,
        kind: str,
        vocab_size: int,
        lowercase: bool,
        strip_accents: bool,
    ) -> "Tokenizer":
        """Learns a vocabulary of at most `vocab_size` entries.

        The same documents in the same order give the same vocabulary, bit for bit,
        except for `unigram`, whose trainer sums in an order that changes from run to
        run: keep the file it made.

        Args:
          documents: read twice by `wordpiece`; an iterator is held in memory.
          kind: `wordpiece`, `bpe` (byte-level) or `unigram`.
          vocab_size: the largest size; a small corpus gives a smaller one.
          lowercase: whether case is lost.
          strip_accents: whether accents are lost; kept ones are composed (NFC).

        Raises:
          InputError: an unknown kind, or a size the alphabet alone exceeds.
        """
        if kind not in KINDS:
            raise InputError(
                f"tokenizer.kind={kind!r} is not one of {', '.join(KINDS)}"
            )
        if iter(documents) is documents:
            documents = list(documents)
        words = _ShortWords(documents)
        library = KINDS[kind](words, vocab_size, lowercase, strip_accents)
        size = library.get_vocab_size()
        if size > vocab_size:
            raise InputError(
                f"tokenizer.vocab_size={vocab_size} is too small: the special tokens"
                f" and the alphabet alone are {size} entries"
            )
        return cls(library)

    @classmethod
    def load(cls, path: str | pathlib.Path) -> "Tokenizer":
        """Reads a `tokenizer.json`."""
        try:
            library = tokenizers.Tokenizer.from_file(str(path))
        except BaseException as error:  # the library raises bare ones, even panics
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            reason = str(error).split("\n")[0]
            raise InputError(f"{path} is not a tokenizer.json: {reason}") from error
        return cls(library, name=str(path))

    @classmethod
    def from_file(
        cls, path: str | pathlib.Path, *, lowercase: bool, strip_accents: bool
    ) -> "Tokenizer":
        """Reads somebody else's vocabulary.

        Args:
          path: BERT's `vocab.txt`, one piece a line, or a `tokenizer.json`.
          lowercase: applies to `vocab.txt`; a `tokenizer.json` says so itself.
          strip_accents: the same.
        """
        path = pathlib.Path(os.path.expanduser(path))
        if not os.path.isfile(path):
            raise InputError(f"tokenizer.file={path} is not a file")
        if path.suffix == ".json":
            return cls.load(path)
        library = _wordpiece(read_vocabulary(path), lowercase, strip_accents)
        return cls(library, name=str(path))

    def save(self, path: str | pathlib.Path) -> None:
        """Writes a `tokenizer.json`, whole or not at all."""
        write_text(pathlib.Path(path), self._json())

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Returns the pieces of each text, unframed, none of them special but [UNK]."""
        # encode_batch_fast leaves out the word ids.
        found = self._library.encode_batch(texts, add_special_tokens=False)
        return [self._encoded(encoding) for encoding in found]

    def encode_with_offsets(
        self, texts: Sequence[str]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the pieces of each text, int32[T], and where each begins and ends in
        it, in characters, int32[T, 2]."""
        found = self._library.encode_batch(texts, add_special_tokens=False)
        return [
            (
                self._encoded(encoding).tokens,
                np.array(encoding.offsets, np.int32).reshape(-1, 2),
            )
            for encoding in found
        ]

    def encode_with_masks(self, text: str) -> Encoded:
        """Returns the pieces of `text`, each literal `[MASK]` as the mask token."""
        # The mask takes the place of a word and of the space before it, as the pieces
        # of byte-level and metaspace vocabularies do.
        *before, last = text.split("[MASK]")
        parts = self.encode([part.rstrip() for part in before] + [last])
        mask = Encoded(np.array([self.special.mask], np.int32), np.array([True]))
        joined = [parts[0]]
        for part in parts[1:]:
            joined += [mask, part]
        return Encoded(*(np.concatenate(field) for field in zip(*joined, strict=True)))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of ids, special tokens included."""
        return self._library.decode([int(i) for i in ids], skip_special_tokens=False)

    def piece(self, id_: int) -> str:
        """Returns the vocabulary entry of one id."""
        return self._library.id_to_token(int(id_)) or ""

    @functools.cached_property
    def byte_lengths(self) -> np.ndarray:
        """int64[V]: the bytes that each id stands for in text; 0 for special ones."""
        lengths_V = piece_text.byte_lengths(self._pieces(), json.loads(self._json()))
        return np.where(self.is_special, 0, lengths_V)

    @functools.cached_property
    def continues_word(self) -> np.ndarray:
        """bool[V]: the ids that stand in a word after its first piece."""
        continues_V = piece_text.continues_word(
            self._pieces(), json.loads(self._json())
        )
        return continues_V & ~self.is_special

    def _pieces(self) -> list[str]:
        return [self.piece(id_) for id_ in range(self.vocab_size)]

    def _json(self) -> str:
        return self._library.to_str(pretty=True)

    def _encoded(self, encoding: tokenizers.Encoding) -> Encoded:
        tokens_T = np.array(encoding.ids, np.int32)
        # A model may know a special token as one of its own pieces; text is text.
        tokens_T[self.is_special[tokens_T]] = self.special.unk
        words_T = np.array(encoding.word_ids, np.int64)
        word_start_T = np.ones(len(tokens_T), bool)
        word_start_T[1:] = words_T[1:] != words_T[:-1]
        return Encoded(tokens_T, word_start_T)


def read_vocabulary(path: pathlib.Path) -> dict[str, int]:
    """Returns {piece: id} of a `vocab.txt`, one piece a line."""
    try:
        lines = path.read_bytes().decode().removesuffix("\n").split("\n")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8: {error}") from error
    return {line.rstrip("\r"): id_ for id_, line in enumerate(lines)}


def _names_of_special(vocabulary, name) -> Sequence[str]:
    for names in NAMES_OF_SPECIAL:
        if all(token in vocabulary for token in names):
            return names
    missing = [token for token in SPECIAL_TOKENS if token not in vocabulary]
    raise InputError(
        f"{name} lacks {' '.join(missing)}; a vocabulary needs all of"
        f" {', or all of '.join(' '.join(names) for names in NAMES_OF_SPECIAL)}"
    )


class _ShortWords:
    """Texts with a space after every 1000 characters that have none: trainers take a
    time quadratic in the length of a word, a day for one of some megabytes."""

    LONG = re.compile(r"(\S{1000})")

    def __init__(self, documents: Iterable[str]):
        self._documents = documents

    def __iter__(self) -> Iterator[str]:
        return (self.LONG.sub(r"\1 ", text) for text in self._documents)


def _train_wordpiece(documents, vocab_size, lowercase, strip_accents):
    library = _wordpiece({}, lowercase, strip_accents)
    # The trainer numbers the pieces `##x` of one character in the order of a hash map
    # and breaks ties between merges by number, so that each run gives another
    # vocabulary. Handing it those pieces, sorted, as special tokens fixes the numbers.
    continuing = [f"##{c}" for c in sorted(_continuing_characters(documents, library))]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[*SPECIAL_TOKENS, *continuing],
        show_progress=False,
    )
    library.train_from_iterator(documents, trainer)
    # A new library forgets that those pieces were special.
    return _wordpiece(
        library.get_vocab(with_added_tokens=False), lowercase, strip_accents
    )


def _continuing_characters(documents, library: tokenizers.Tokenizer) -> set[str]:
    """Returns the characters that follow another one inside a word."""
    seen: set[str] = set()
    for text in documents:
        seen.update(library.normalizer.normalize_str(text).split())
    pairs = {pair for word in seen for pair in zip(word, word[1:], strict=False)}
    words = library.pre_tokenizer.pre_tokenize_str
    return {b for a, b in pairs if [word for word, _ in words(a + b)] == [a + b]}


def _wordpiece(vocabulary, lowercase, strip_accents) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    bert = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    # Without NFC a decomposed accent would be a piece of its own, or unknown.
    library.normalizer = (
        bert if strip_accents else normalizers.Sequence([normalizers.NFC(), bert])
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(prefix="##")
    library.add_special_tokens([s for s in SPECIAL_TOKENS if s in vocabulary])
    return library


def _train_bpe(documents, vocab_size, lowercase, strip_accents):
    library = tokenizers.Tokenizer(models.BPE())
    library.normalizer = _normalizer(lowercase, strip_accents)
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator(documents, trainer)
    return library


def _train_unigram(documents, vocab_size, lowercase, strip_accents):
    library = tokenizers.Tokenizer(models.Unigram())
    spaces = normalizers.Replace(tokenizers.Regex(r"\s+"), " ")
    library.normalizer = normalizers.Sequence(
        [_normalizer(lowercase, strip_accents), spaces]
    )
    # Brackets stand alone, or the trained model would spell [MASK] as the mask.
    brackets = pre_tokenizers.Split(tokenizers.Regex(r"[\[\]]"), "isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), brackets]
    )
    library.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        unk_token="[UNK]",
        show_progress=False,
    )
    library.train_from_iterator(documents, trainer)
    # Read back, a score of 17 digits differs in the last one, and so would the digest.
    pieces = json.loads(library.to_str())["model"]["vocab"]
    unk_id = SPECIAL_TOKENS.index("[UNK]")
    library.model = models.Unigram(
        [(p, round(score, 6)) for p, score in pieces], unk_id
    )
    return library


def _normalizer(lowercase: bool, strip_accents: bool) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if strip_accents:
        steps += [normalizers.NFD(), normalizers.StripAccents()]
    if lowercase:
        steps += [normalizers.Lowercase()]
    return normalizers.Sequence([*steps, normalizers.NFC()])


KINDS: dict[str, Callable[..., tokenizers.Tokenizer]] = {
    "wordpiece": _train_wordpiece,
    "bpe": _train_bpe,
    "unigram": _train_unigram,
}
