"""Writes the report of an experiment.

    python -m mlm_jax.report experiments/mask_rate.py --workdir=runs/mask_rate

Reads what the runs below the directory have written, finished or not, and writes to
its `report/`: `index.html`, one page that needs no other file; `report.md`;
`report.json`, every number of both; and each picture as SVG and PNG. The same runs give
the same files; what depends on the clock is in a section of its own.
"""

import json
import pathlib

from mlm_jax import command
from mlm_jax.errors import InputError
from mlm_jax.experiment import charts, document, page, report, results, sweep, words
from mlm_jax.files import write_text

WORKDIR = command.define_workdir("that of a sweep, with a folder for each arm")


def write(experiment, directory):
    """Writes the report of the runs in `directory`; returns its facts.

    Raises InputError for runs that cannot be read.
    """
    directory = pathlib.Path(directory)
    if not directory.is_dir():
        raise InputError(f"--workdir={directory}: no such directory.")
    facts = report.make_facts(experiment, results.read(experiment, directory))
    figures = charts.draw(facts)
    pictures = {name: charts.save(figure, "svg") for name, figure in figures.items()}
    sections = document.make_sections(facts, list(pictures))
    folder = directory / "report"
    try:
        folder.mkdir(exist_ok=True)
        for name, figure in figures.items():
            (folder / f"{name}.svg").write_bytes(pictures[name])
            (folder / f"{name}.png").write_bytes(charts.save(figure, "png"))
        title = experiment.name.replace("_", " ")
        write_text(folder / "report.json", json.dumps(facts, indent=1) + "\n")
        write_text(folder / "report.md", page.to_markdown(title, sections))
        write_text(folder / "index.html", page.to_html(title, sections, pictures))
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}.") from error
    return facts


def main(arguments):
    if len(arguments) != 1:
        raise InputError(
            "expected one experiment, such as experiments/mask_rate.py; "
            f"{len(arguments)} were given."
        )
    facts = write(sweep.load(arguments[0]), WORKDIR.value)
    for text in words.answer_sentences(facts) + facts["warnings"]:
        print(text)
    print(f"{WORKDIR.value}/report/index.html")


if __name__ == "__main__":
    command.run(main, positional="EXPERIMENT")
