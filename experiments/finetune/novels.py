"""Makes the task files of "which of the six novels is this passage from?".

    python experiments/finetune/novels.py /tmp/novels

Writes `train.jsonl`, `validation.jsonl` and `test.jsonl`, one object a line with `text`
and `novel`, and a file a chapter of the train split in `text/`: to pre-train on
`files:/tmp/novels/text/*.txt` is to have seen nothing of the other two.

The split is by chapter, so that the context of a passage is never on another side: of
every ten chapters of a novel the third is for validation, the seventh and eighth for
the test. A passage is two sentences of a paragraph that follow each other, or the one
that is left, of at least eight words; headings, and passages that occur twice, are left
out.
"""

import collections
import json
import pathlib
import re
import sys

AUSTEN = pathlib.Path(__file__).parents[2] / "mlm_jax" / "data" / "austen"
CHAPTER = re.compile(r"^(?:CHAPTER|Chapter) \w+\s*$", re.MULTILINE)
VOLUME = re.compile(r"^VOLUME \w+\s*$", re.MULTILINE)
# After . ! or ? and perhaps a closing quote, before a capital or an opening quote, but
# not after Mr., Mrs. or Dr.
SENTENCE = re.compile(r"(?<!\bMr\.)(?<!Mrs\.)(?<!\bDr\.)(?<=[.!?\"”'])\s+(?=[\"“A-Z])")
SPLIT_OF = {2: "validation", 6: "test", 7: "test"}
MIN_WORDS = 8


def chapters(text):
    """Returns the text of each chapter, without headings."""
    return [VOLUME.sub("", part).strip() for part in CHAPTER.split(text)[1:]]


def passages(chapter):
    """Yields the passages of a chapter."""
    for paragraph in re.split(r"\n\s*\n", chapter):
        sentences = SENTENCE.split(" ".join(paragraph.split()))
        sentences = [sentence.strip() for sentence in sentences if sentence.strip()]
        for i in range(0, len(sentences), 2):
            passage = " ".join(sentences[i : i + 2])
            if len(passage.split()) >= MIN_WORDS:
                yield passage


def main(folder):
    rows = collections.defaultdict(list)
    (folder / "text").mkdir(parents=True, exist_ok=True)
    for path in sorted(AUSTEN.glob("*.txt")):
        for number, chapter in enumerate(chapters(path.read_text(encoding="utf-8"))):
            split = SPLIT_OF.get(number % 10, "train")
            rows[split] += [{"text": p, "novel": path.stem} for p in passages(chapter)]
            if split == "train":
                name = f"{path.stem}-{number + 1:02}.txt"
                (folder / "text" / name).write_text(chapter, encoding="utf-8")
    texts = [row["text"] for found in rows.values() for row in found]
    counts = collections.Counter(texts)
    for split, found in rows.items():
        found = [row for row in found if counts[row["text"]] == 1]
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in found]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        novels = collections.Counter(row["novel"] for row in found)
        words = sum(len(row["text"].split()) for row in found) / len(found)
        print(f"{split}: {len(found):,} passages of {words:.0f} words, {dict(novels)}")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
