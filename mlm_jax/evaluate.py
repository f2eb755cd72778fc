"""Evaluates trained models under frozen masks: any strategy, any rates, several runs.

    python -m mlm_jax.evaluate runs/a runs/b --rates=0.15,0.4,0.8 \
        --strategies=token,word,span --output=exam.json

Prints a matrix for each strategy: a line a run, a column a rate, the held-out loss in
nats a prediction and the bits per byte of hidden text. Runs of one data set meet the
same masks, whatever they were trained with. With --details, and always in --output:
accuracy, calibration, and loss by the frequency of the hidden token, by part of its
word and by position.
"""

import json
import pathlib

from absl import flags

import mlm_jax
from mlm_jax import command, exam
from mlm_jax.data.progress import Countdown
from mlm_jax.errors import InputError
from mlm_jax.files import write_text

STEP = command.define_step()
OUTPUT = command.define_output("JSON file to write all figures to.")
RATES = flags.DEFINE_list("rates", None, "By default those of the first run's config.")
STRATEGIES = flags.DEFINE_list(
    "strategies", ["token"], f"Of {', '.join(exam.WITHOUT_A_LIST)}, pmi."
)
COLLOCATIONS = flags.DEFINE_string("collocations", None, "The list that pmi reads.")
ROWS = flags.DEFINE_integer(
    "rows", None, "Held-out rows, 0 for all; by default as in training.", lower_bound=0
)
BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", None, "Rows at a time; changes no figure.", lower_bound=1
)
DETAILS = flags.DEFINE_bool("details", False, "Print tables of each exam.")


def main(workdirs):
    if not workdirs:
        raise InputError("no run to evaluate, such as runs/austen.")
    rates = RATES.value and [_number(rate) for rate in RATES.value]
    if rates is not None:
        exam.check(tuple(rates), STRATEGIES.value, COLLOCATIONS.value)
    runs = []
    for directory in workdirs:
        trained = mlm_jax.load(directory, STEP.value)
        rates = rates or trained.config.eval.rates
        reports = trained.evaluate(
            rates=rates,
            strategies=STRATEGIES.value,
            collocations=COLLOCATIONS.value,
            num_rows=ROWS.value,
            batch_size=BATCH_SIZE.value,
            log=command.tell,
            make_tick=lambda rows, name: Countdown(command.tell, name, "rows", rows),
        )
        policy = trained.config.corruption
        runs.append(
            {
                "workdir": str(directory),
                "step": trained.step,
                "trained_with": f"{policy.strategy}@{policy.rate:g}",
                "tokenizer": trained.tokenizer.digest,
                "exams": reports,
            }
        )
    for strategy in STRATEGIES.value:
        print(matrix(runs, strategy, rates))
    if DETAILS.value:
        for run in runs:
            for name, report in run["exams"].items():
                print(f"\n{run['workdir']}, {name}\n{details(report)}")
    if OUTPUT.value:
        path = pathlib.Path(OUTPUT.value)
        write_text(path, json.dumps({"runs": runs}, indent=2) + "\n")


def matrix(runs, strategy, rates):
    """Returns the losses and bits per byte as lines for a person."""
    names = [f"{strategy}@{rate:g}" for rate in rates]
    labels = [f"{run['workdir']} ({run['trained_with']})" for run in runs]
    width = max(map(len, labels))
    lines = [f"{'':{width}}" + "".join(f"{name:>18}" for name in names)]
    for label, run in zip(labels, runs, strict=True):
        cells = [run["exams"][name] for name in names]
        texts = [f"{cell['loss']:.4f} ({cell['bits_per_byte']:.3f})" for cell in cells]
        lines.append(f"{label:{width}}" + "".join(f"{text:>18}" for text in texts))
    if len({str([run["exams"][n]["mask_hash"] for n in names]) for run in runs}) > 1:
        lines.append("These runs hide different tokens: compare bits per byte alone.")
    return "\n".join(lines)


def details(report):
    """Returns the tables of one exam as lines for a person."""
    error = report["calibration"]["expected_calibration_error"]
    lines = [
        f"loss {report['loss']:.4f}  perplexity {report['perplexity']:,.1f}  accuracy "
        f"{report['accuracy']:.2%}  in the best five {report['top5']:.2%}  bits per "
        f"byte {report['bits_per_byte']:.4f}",
        f"expected calibration error {error:.4f}; masks {report['mask_hash']:08x}",
    ]
    titles = {
        "by_frequency": "times in training",
        "by_part": "part of a word",
        "by_position": "position",
    }
    for table, title in titles.items():
        lines.append(f"  {title:24}{'predictions':>12}{'loss':>9}{'accuracy':>10}")
        for line in report[table]:
            lines.append(
                f"  {line['group']:24}{line['num_predictions']:>12,}"
                f"{line['loss']:>9.4f}{line['accuracy']:>10.2%}"
            )
    return "\n".join(lines)


def _number(text):
    try:
        return float(text)
    except ValueError as error:
        raise InputError(f"--rates has {text!r}; expected numbers.") from error


if __name__ == "__main__":
    command.run(main, positional="workdirs")
