"""The steps as one page, or as lines of text."""

import textwrap

from mlm_jax.experiment import page
from mlm_jax.experiment.page import Block, Picture, Section, Table, Text
from mlm_jax.explaining.learning import LAST
from mlm_jax.explaining.steps import FIRST
from mlm_jax.explaining.words import name_of

TITLE = "Masked language modeling, step by step"
STYLE = (
    page.STYLE
    + """
body { max-width: 70rem; }
figure { max-width: 30rem; flex-basis: 100%; }
.formula { font-family: ui-monospace, monospace; font-size: .95rem; background: #fff;
  border: 1px solid var(--line); border-radius: .4rem; padding: .45rem .7rem; }
.by { color: var(--dim); font: .85rem ui-monospace, monospace; }
@media (min-width: 60rem) {
  section { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr);
    column-gap: 2.5rem; align-items: start; border-top: 1px solid var(--line);
    margin-top: 1.75rem; }
  section h2 { grid-column: 1 / -1; margin-top: 1.25rem; }
  section p { grid-column: 1; }
  section .beside { grid-column: 2; grid-row: 2 / span 40; margin-top: 0; }
}
"""
)


def make_steps(story):
    return [make(story) for make in [*FIRST, *LAST]]


def opening(story):
    """Returns the sentences above the steps."""
    lead = (
        "How a computer learns words by hiding them from itself. The numbers below "
        "were computed when this was written, by functions that train a model, and "
        "rounded; each step names its functions."
    )
    return lead, f"The numbers are those of {story.subject.source}."


def to_html(story):
    steps = make_steps(story)
    lead, source = opening(story)
    pictures = {}
    sections = [Section("top", "", [Text(lead, "lead"), Text(source, "note")])]
    for number, step in enumerate(steps, 1):
        blocks: list[Block] = [Text(text) for text in step.paragraphs]
        if step.formula:
            blocks.append(Text(step.formula, "formula"))
        for i, (caption, picture) in enumerate(step.pictures):
            name = f"step{number}-{i + 1}"
            pictures[name] = picture.svg().encode()
            blocks.append(Picture(name, caption))
        if step.table:
            blocks.append(step.table)
        blocks.append(Text(_by(step), "by"))
        sections.append(Section(f"step{number}", f"{number}. {step.title}", blocks))
    return page.to_html(TITLE, sections, pictures, style=STYLE)


def to_text(story, *, color, width):
    def bold(text):
        return f"\x1b[1m{text}\x1b[0m" if color else text

    lines = [bold(TITLE), ""]
    for text in opening(story):
        lines += textwrap.wrap(text, width)
    for number, step in enumerate(make_steps(story), 1):
        lines += ["", bold(f"{number}. {step.title}")]
        for text in step.paragraphs:
            lines += _indented(text, width)
        for caption, picture in step.pictures:
            if drawn := list(picture.lines(width - 4)):
                lines += ["", *_indented(caption, width)]
                lines += [f"    {line}" for line in drawn]
        if step.table:
            lines += ["", *_table_lines(step.table)]
        if step.formula:
            lines += ["", f"    {step.formula}"]
        lines += ["", f"  {_by(step)}"]
    return "\n".join(lines)


def _indented(text, width):
    return textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="  ")


def _by(step):
    return "in the code: " + ", ".join(map(name_of, step.functions))


def _table_lines(table: Table):
    body = [[str(cell) for cell in row] for row in table.rows]
    rows = [table.header, *body]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = [f"{c:>{w}}" for c, w in zip(rest, widths[1:], strict=True)]
        yield "    " + "  ".join([f"{first:<{widths[0]}}", *cells])
