"""Explains masked language modeling from nothing, with the numbers of a model.

    python -m mlm_jax.walkthrough --html=walkthrough.html
    python -m mlm_jax.walkthrough --workdir=runs/tiny "The cat sat on the [MASK]."

Without a run, the numbers are those of an example of three words. `--html` writes the
same as a page, with pictures.
"""

from absl import flags

import mlm_jax
from mlm_jax import command
from mlm_jax.errors import InputError
from mlm_jax.explaining import story, subjects, telling

WORKDIR = command.define_workdir("the model to use; without one, an example")
STEP = command.define_step()
TOP = command.define_once(
    flags.DEFINE_integer, "top", 5, "Words to show for a hidden place.", lower_bound=1
)
COLOR = command.define_color()
HTML = command.define_html()


def subject_of(texts, workdir, step, top):
    """Returns who is explained. Raises InputError where text and run do not go
    together."""
    example = '"The cat sat on the [MASK]."'
    if workdir is None:
        if texts:
            raise InputError(
                f"a text of your own needs a model to read it: --workdir=DIR "
                f"{example}; without both, an example is explained."
            )
        if step is not None:
            raise InputError(f"--step={step} is of a run: --workdir=DIR is missing.")
        return subjects.Example()
    if len(texts) != 1:
        raise InputError(f"{len(texts)} texts; expected one, such as {example}")
    return subjects.Run(mlm_jax.load(workdir, step), texts[0], top)


def main(texts):
    command.check_html(HTML.value)
    told = story.gather(subject_of(texts, WORKDIR.value, STEP.value, TOP.value))
    print(telling.to_text(told, **command.terminal(COLOR.value)))
    if HTML.value:
        command.write_html(HTML.value, telling.to_html(told))


if __name__ == "__main__":
    command.run(main, positional="text", needs_workdir=False)
