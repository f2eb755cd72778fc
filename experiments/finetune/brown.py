"""Makes task files of the Brown corpus: genres of passages, part-of-speech tags.

    python experiments/finetune/brown.py brown.jsonl.xz /tmp/brown

Reads one object a line with `id`, `genre` and `sentences` of `words` and `tags`.
Writes `genre/` (three sentences that follow each other, with `text` and `genre`) and
`tags/` (a sentence, with `words` and `tags`), each with train, validation and test. The
split is by document: of every ten of a genre the third is for validation, the seventh
and eighth for the test. A tag is cut to its first part (`nn-tl` and `nn$` are `nn`),
and `other` if it is rare.
"""

import collections
import json
import lzma
import pathlib
import re
import sys

SPLIT_OF = {2: "validation", 6: "test", 7: "test"}
SENTENCES = 3
RARE = 1e-3  # share of the training words, below which a tag is called `other`
AFTER = re.compile(r"(?<=.)[-+$*].*")


def simple(tag):
    return AFTER.sub("", tag.removeprefix("fw-"))


def tasks(documents):
    """Yields (task, split, row)."""
    seen = collections.Counter()
    for document in documents:
        genre, sentences = document["genre"], document["sentences"]
        split = SPLIT_OF.get(seen[genre] % 10, "train")
        seen[genre] += 1
        for i in range(0, len(sentences) - SENTENCES + 1, SENTENCES):
            words = [w for s in sentences[i : i + SENTENCES] for w in s["words"]]
            yield "genre", split, {"text": " ".join(words), "genre": genre}
        for sentence in sentences:
            tags = [simple(tag) for tag in sentence["tags"]]
            yield "tags", split, {"words": sentence["words"], "tags": tags}


def common_tags(rows):
    counts = collections.Counter(tag for row in rows for tag in row["tags"])
    return {tag for tag in counts if counts[tag] >= RARE * counts.total()}


def main(source, folder):
    rows = collections.defaultdict(list)
    with lzma.open(source, "rt", encoding="utf-8") as lines:
        for task, split, row in tasks(map(json.loads, lines)):
            rows[task, split].append(row)
    common = common_tags(rows["tags", "train"])
    for (task, split), found in rows.items():
        for row in found if task == "tags" else ():
            row["tags"] = [tag if tag in common else "other" for tag in row["tags"]]
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in found]
        path = folder / task / f"{split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines), encoding="utf-8")
        print(f"{task}/{split}: {len(found):,} rows")


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]))
