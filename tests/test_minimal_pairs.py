"""Minimal pairs: the likelier sentence wins, ties are counted."""

import json

import numpy as np
import pytest

from mlm_jax.errors import InputError
from mlm_jax.tasks import minimal_pairs
from mlm_jax.tasks.likelihood import pseudo_log_likelihood
from mlm_jax.tasks.minimal_pairs import Accuracy, Judged, Pair
from tests.reading import make_reader

PAIRS = [
    Pair("order", "0", "the world is wide", "world the wide is"),
    Pair("order", "1", "hello wide world", "wide hello hello world"),
    Pair("same", "0", "the word", "the word"),
    Pair("same", "1", "the qqq", "the zzz"),  # [UNK] both
]


def judged(reader, pairs=PAIRS):
    return list(minimal_pairs.judge(reader, minimal_pairs.encode(reader, pairs)))


def test_a_pair_is_judged_by_the_likelihood_of_its_sentences():
    reader = make_reader()
    found = judged(reader)
    for pair, scores in zip(PAIRS, found, strict=True):
        both = pseudo_log_likelihood(reader, [pair.good, pair.bad])
        np.testing.assert_allclose(scores, [x.pll for x in both], atol=1e-5)
    assert [x.is_tie for x in found] == [False, False, True, True]
    # What is right for one is wrong for the pair turned round, and a tie for neither.
    turned = judged(reader, [p._replace(good=p.bad, bad=p.good) for p in PAIRS])
    wins = [a.is_correct + b.is_correct for a, b in zip(found, turned, strict=True)]
    assert wins == [1, 1, 0, 0]


@pytest.mark.parametrize("batch_tokens, devices", [(40, 1), (64, 8)])
def test_batch_sizes_do_not_show(batch_tokens, devices):
    found = judged(make_reader())
    other = judged(make_reader(batch_tokens=batch_tokens, devices=devices))
    np.testing.assert_allclose(other, found, rtol=1e-5, atol=1e-5)
    assert [x.is_tie for x in other] == [x.is_tie for x in found]


def test_accuracy_by_paradigm_by_hand():
    scores = [Judged(-1, -2), Judged(-2, -1), Judged(-3, -3), Judged(-3, -3.00005)]
    by_paradigm, overall = minimal_pairs.accuracies(PAIRS, scores)
    assert by_paradigm == {"order": Accuracy(2, 1, 0), "same": Accuracy(2, 0, 2)}
    assert overall == Accuracy(4, 1, 2) and overall.share == 0.25


def test_files_in_blimps_form(tmp_path):
    lines = {
        "b.jsonl": '{"sentence_good": "é a", "sentence_bad": "b", "UID": "u", '
        '"pairID": "7", "field": "syntax"}\n\n',
        "a.jsonl": '{"sentence_good": "c", "sentence_bad": "d"}\n' * 2,
        "note.txt": "not read",
    }
    for name, text in lines.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert minimal_pairs.read(tmp_path) == [
        Pair("a", "0", "c", "d"),
        Pair("a", "1", "c", "d"),
        Pair("u", "7", "é a", "b"),
    ]
    assert len(minimal_pairs.read(tmp_path / "a.jsonl")) == 2


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"sentence_good": "a"}',
        '{"sentence_good": "a", "sentence_bad": 1}',
        '{"sentence_good": null, "sentence_bad": "a"}',
    ],
)
def test_what_is_no_pair_is_named(tmp_path, line):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"sentence_good": "c", "sentence_bad": "d"}\n' + line)
    with pytest.raises(InputError, match="pairs.jsonl, line 2 is no minimal pair"):
        minimal_pairs.read(path)


def test_no_file_and_no_pairs_are_refused(tmp_path):
    with pytest.raises(InputError, match="nothing.jsonl cannot be read: No such file"):
        minimal_pairs.read(tmp_path / "nothing.jsonl")
    with pytest.raises(InputError, match="has no minimal pairs"):
        minimal_pairs.read(tmp_path)


def test_a_sentence_that_is_too_long_is_refused_before_any_is_judged():
    long = Pair("u", "0", "wide", "wide " * 40)
    with pytest.raises(InputError, match="has 42 tokens.* at most 32"):
        minimal_pairs.encode(make_reader(), [*PAIRS, long])


def test_the_bundled_suite_agrees_in_the_right_sentence():
    """Both sentences have the same words but one, and every paradigm both numbers, so
    that always preferring a form is right in about half of the pairs."""
    pairs = minimal_pairs.read("bundled:agreement")
    assert len(set(pairs)) == len(pairs)
    assert len({(p.uid, p.pair_id) for p in pairs}) == len(pairs)
    singular = {"is", "was", "has", "this", "that", "herself.", "himself."}
    forms: dict[str, list] = {}
    for pair in pairs:
        good, bad = pair.good.split(), pair.bad.split()
        different = [(a, b) for a, b in zip(good, bad, strict=True) if a != b]
        assert len(different) == 1, pair
        forms.setdefault(pair.uid, []).append(different[0][0] in singular)
    assert len(forms) == 5
    for uid, is_singular in forms.items():
        assert np.mean(is_singular) == 0.5, uid
    by_hand = [p for p in pairs if p.good == "The ladies saw themselves."]
    assert [p.bad for p in by_hand] == ["The ladies saw herself."]
    assert json.dumps(pairs) == json.dumps(minimal_pairs.read("bundled:agreement"))
