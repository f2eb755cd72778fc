"""Scores texts by their pseudo-log-likelihood under a trained model.

    python -m mlm_jax.score --workdir=runs/austen sentences.txt --output=scores.jsonl

Reads a text a line, from files or the standard input, and writes a JSON object a line:
`text`, `pll` (in nats), `num_tokens`, and with --per_token `tokens` and `log_p`. Last,
on stderr, the pseudo-perplexity of all: exp of minus the sum of PLL over the number of
tokens.

--pll says what is hidden while a token is predicted: the token and the later pieces of
its word (within_word_l2r), the token alone (original), its whole word (whole_word).
"""

import json

from absl import flags

import mlm_jax
from mlm_jax import command
from mlm_jax.data.progress import Countdown
from mlm_jax.tasks import likelihood, texts

WORKDIR = command.define_workdir("the model to use")
STEP = command.define_step()
PLL = command.define_pll(likelihood.KINDS, likelihood.DEFAULT)
OUTPUT = command.define_output("Where the lines go; by default to the terminal.")
PER_TOKEN = flags.DEFINE_bool("per_token", False, "Tell of each token, too.")


def main(paths):
    lines = texts.read_lines(paths)
    trained = mlm_jax.load(WORKDIR.value, STEP.value)
    reader = trained.reader
    encoded = reader.encode(lines)
    num_tokens = sum(len(text.tokens) for text in encoded)
    tick = Countdown(command.tell, "scoring", "tokens", num_tokens)
    found = []
    with texts.output(OUTPUT.value) as file:
        for text, scored in zip(
            lines, likelihood.likelihoods(reader, encoded, PLL.value, tick), strict=True
        ):
            print(json.dumps(_line(text, scored, trained.tokenizer)), file=file)
            found.append(scored)
    command.tell(
        f"{trained.workdir}, step {trained.step:,}: {len(lines):,} texts, "
        f"{num_tokens:,} tokens, pseudo-perplexity "
        f"{likelihood.pseudo_perplexity(found):,.4f} ({PLL.value})"
    )


def _line(text, scored, tokenizer):
    line = {"text": text, "pll": scored.pll, "num_tokens": len(scored.tokens_T)}
    if PER_TOKEN.value:
        line["tokens"] = [tokenizer.piece(id_) for id_ in scored.tokens_T]
        line["log_p"] = scored.log_p_T.tolist()
    return line


if __name__ == "__main__":
    command.run(main, positional="files")
