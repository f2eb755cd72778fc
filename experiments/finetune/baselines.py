"""What a task is worth without an encoder: majority, and bags of words.

    python experiments/finetune/baselines.py --label=novel \
        train.jsonl validation.jsonl test.jsonl

Logistic regression on tf-idf of words, and of words and their pairs; what is best on
validation is met with the test. For tagged sentences (--words=words) the bag is the tag
that each word has most often, and the majority tag for words not seen.
"""

import argparse
import collections
import json
import pathlib

from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

STRENGTHS = (0.3, 1, 3, 10, 30, 100)  # the inverse of the penalty
NGRAMS = ((1, 1), (1, 2))


def classification(splits, label):
    texts = [[row["text"] for row in rows] for rows in splits]
    names = [[row[label] for row in rows] for rows in splits]
    common = collections.Counter(names[0]).most_common(1)[0][0]
    print(f"majority ({common}): test {names[2].count(common) / len(names[2]):.4f}")
    found = []
    for ngrams in NGRAMS:
        vectors = TfidfVectorizer(ngram_range=ngrams, sublinear_tf=True)
        train = vectors.fit_transform(texts[0])
        validation, test = (vectors.transform(some) for some in texts[1:])
        for strength in STRENGTHS:
            model = LogisticRegression(C=strength, max_iter=2000).fit(train, names[0])
            scores = model.score(validation, names[1]), model.score(test, names[2])
            found.append((*scores, ngrams[1], strength))
    score, on_test, longest, strength = max(found)
    print(
        f"bag of words (n-grams up to {longest}, C {strength:g}): validation "
        f"{score:.4f}, test {on_test:.4f}"
    )


def tagging(splits, words, label):
    tags = collections.defaultdict(collections.Counter)
    for row in splits[0]:
        for word, tag in zip(row[words], row[label], strict=True):
            tags[word.lower()][tag] += 1
    common = sum(tags.values(), collections.Counter()).most_common(1)[0][0]
    usual = {word: counts.most_common(1)[0][0] for word, counts in tags.items()}
    pairs = [
        (usual.get(word.lower(), common), tag)
        for row in splits[2]
        for word, tag in zip(row[words], row[label], strict=True)
    ]
    majority = sum(tag == common for _, tag in pairs) / len(pairs)
    right = sum(guess == tag for guess, tag in pairs) / len(pairs)
    print(f"majority ({common}): test {majority:.4f}")
    print(f"the usual tag of each word: test {right:.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--label", default="label")
    parser.add_argument("--words")
    parser.add_argument("files", nargs=3, type=pathlib.Path)
    given = parser.parse_args()
    splits = [
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in given.files
    ]
    if given.words:
        tagging(splits, given.words, given.label)
    else:
        classification(splits, given.label)


if __name__ == "__main__":
    main()
