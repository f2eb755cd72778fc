"""Judges minimal pairs: how often the right sentence is the likelier one.

    python -m mlm_jax.judge_pairs --workdir=runs/austen blimp/data --output=blimp.jsonl

PATHS are files in the form of BLiMP, one JSON object a line with `sentence_good`,
`sentence_bad` and `UID`, or directories of them; `bundled:agreement` is a small suite
that comes with the package. Prints the accuracy of each paradigm and of all pairs. A
tie, of sentences that are equally likely to 1e-4 nats, is not correct, and is counted.

`--output` has a line for each pair, written as they are judged. The same command again
goes on where the file ends.
"""

import hashlib
import itertools
import json
import pathlib
import time

import mlm_jax
from mlm_jax import checkpoint, command
from mlm_jax.data.progress import Countdown, duration
from mlm_jax.errors import InputError
from mlm_jax.tasks import likelihood, minimal_pairs, texts

WORKDIR = command.define_workdir("the model to use")
STEP = command.define_step()
PLL = command.define_pll(likelihood.KINDS, likelihood.DEFAULT)
OUTPUT = command.define_output("File with a line for each pair; resumed if it exists.")


def main(paths):
    if not paths:
        raise InputError("no minimal pairs, such as bundled:agreement or blimp/data.")
    pairs = [pair for path in paths for pair in minimal_pairs.read(path)]
    trained = mlm_jax.load(WORKDIR.value, STEP.value)
    begin = time.monotonic()
    if OUTPUT.value is None:
        judged = list(_judged(trained, pairs))
    else:
        judged = _resumed(pathlib.Path(OUTPUT.value), trained, pairs)
    print(f"{trained.workdir}, step {trained.step:,}, {PLL.value}")
    print(table(*minimal_pairs.accuracies(pairs, judged)))
    command.tell(f"{len(pairs):,} pairs in {duration(time.monotonic() - begin)}")


def _judged(trained, pairs):
    encoded = minimal_pairs.encode(trained.reader, pairs)
    total = sum(len(sentence.tokens) for sentence in encoded)
    tick = Countdown(command.tell, "judging", "tokens", total)
    return minimal_pairs.judge(trained.reader, encoded, PLL.value, tick)


def _resumed(path, trained, pairs):
    """Judges what the file has not yet; returns all."""
    facts = {
        "step": trained.step,
        "params": checkpoint.digest(trained.params),
        "pll": PLL.value,
        "pairs": hashlib.sha256(json.dumps(pairs).encode()).hexdigest(),
    }
    keep, judged = _read(path, facts) if path.exists() else (0, [])
    with texts.output(path, keep) as file:
        if not keep:
            _write(file, facts)
        else:
            command.tell(f"{path} has {len(judged):,} of {len(pairs):,} pairs")
        rest = pairs[len(judged) :]
        for pair, found in zip(rest, _judged(trained, rest), strict=True):
            _write(file, {"UID": pair.uid, "pairID": pair.pair_id} | found._asdict())
            judged.append(found)
    return judged


def _read(path, facts):
    """Returns the bytes of whole lines, and the pairs that were judged. Raises
    InputError for those of another model or suite."""
    data = texts.read_bytes(path)
    keep = data.rfind(b"\n") + 1  # a line that was cut short is written anew
    if not data:
        return 0, []
    try:
        first, *judged = map(json.loads, data[:keep].splitlines())
        judged = [minimal_pairs.Judged(line["good"], line["bad"]) for line in judged]
        differs = [name for name in facts if first[name] != facts[name]]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"--output={path} is there, and is not a file of judged pairs ({error!r})."
        ) from error
    if differs:
        raise InputError(
            f"--output={path} has pairs judged otherwise: {', '.join(differs)} "
            f"{'is' if len(differs) == 1 else 'are'} not the same; use another file."
        )
    return keep, judged


def _write(file, line):
    print(json.dumps(line), file=file, flush=True)


def table(by_paradigm, overall):
    """Returns the accuracies as lines for a person."""
    width = max(map(len, by_paradigm))
    rows = itertools.chain(sorted(by_paradigm.items()), [("all", overall)])
    return "\n".join(
        f"{name:{width}}  {found.share:6.1%} of {found.pairs:,}"
        + (f", {found.ties:,} ties" if found.ties else "")
        for name, found in rows
    )


if __name__ == "__main__":
    command.run(main, positional="paths")
