"""A small suite of minimal pairs from a grammar: agreement in English.

Its words are common ones, in novels of any time. It is for tests, and to see in minutes
whether a model has begun to know grammar; for results there is BLiMP.
"""

import itertools

NOUNS = (
    ("sister", "sisters"),
    ("brother", "brothers"),
    ("daughter", "daughters"),
    ("friend", "friends"),
    ("lady", "ladies"),
    ("gentleman", "gentlemen"),
    ("letter", "letters"),
    ("house", "houses"),
)
PEOPLE = NOUNS[:6]
VERBS = (("is", "are"), ("was", "were"), ("has been", "have been"))
ENDS = ("here", "very good", "in the country")
NUMBERS = (0, 1)  # singular, plural


def subject_verb():
    """The sister is here. / The sister are here."""
    for noun, verb, end, n in itertools.product(NOUNS, VERBS, ENDS, NUMBERS):
        yield from _pair(f"The {noun[n]} {{}} {end}.", verb, n)


def subject_verb_across_phrase():
    """The sister of the ladies is here. A noun of the other number lies between."""
    for noun, other, verb, n in itertools.product(NOUNS, PEOPLE, VERBS, NUMBERS):
        if noun is not other:
            subject = f"The {noun[n]} of the {other[1 - n]}"
            yield from _pair(f"{subject} {{}} {ENDS[0]}.", verb, n)


def subject_verb_across_clause():
    """The sister who loved the ladies is here."""
    for noun, other, verb, n in itertools.product(PEOPLE, PEOPLE, VERBS, NUMBERS):
        if noun is not other:
            subject = f"The {noun[n]} who loved the {other[1 - n]}"
            yield from _pair(f"{subject} {{}} {ENDS[0]}.", verb, n)


def determiner_noun():
    """She saw this house. / She saw these house."""
    demonstratives = ("this", "these"), ("that", "those")
    subjects = "She", "He", "They", "We"
    for noun, which, subject, n in itertools.product(
        NOUNS, demonstratives, subjects, NUMBERS
    ):
        yield from _pair(f"{subject} saw {{}} {noun[n]}.", which, n)


def reflexive():
    """The lady saw herself. / The lady saw themselves."""
    own = {"sister": "herself", "daughter": "herself", "lady": "herself"}
    verbs = "saw", "found", "loved", "thought of", "spoke of", "blamed"
    for noun, verb, n in itertools.product(PEOPLE, verbs, NUMBERS):
        pronouns = own.get(noun[0], "himself"), "themselves"
        yield from _pair(f"The {noun[n]} {verb} {{}}.", pronouns, n)


PARADIGMS = (
    subject_verb,
    subject_verb_across_phrase,
    subject_verb_across_clause,
    determiner_noun,
    reflexive,
)


def pairs():
    """Yields (paradigm, number of the pair, good sentence, bad sentence)."""
    for paradigm in PARADIGMS:
        for number, (good, bad) in enumerate(paradigm()):
            yield f"agreement_{paradigm.__name__}", str(number), good, bad


def _pair(frame, forms, n):
    yield frame.format(forms[n]), frame.format(forms[1 - n])
