"""The report of `show_masks`, as text for a terminal and as a page of its own."""

import html
from typing import NamedTuple


class Piece(NamedTuple):
    """A token to show."""

    kind: str  # text, special, mask, random, kept
    text: str
    seen: str = ""  # what stands in its place, if random
    joint: str = ""  # to the token before: a space, · within a word, or nothing
    seen_joint: str = ""  # · where `seen` is the inside of a word


class Group(NamedTuple):
    """Tokens that are shown as one: a hidden unit, or all that lies between two."""

    is_hidden: bool
    is_predicted: bool
    pieces: list[Piece]


class Row(NamedTuple):
    title: str
    segments: list[list[Group]]


class Chart(NamedTuple):
    """Bars: how many fell into each class, and the share that the config asks for."""

    title: str
    labels: list[str]
    counts: list[int]
    asked: list[float]  # of each class; empty where the config asks for none
    marked: int | None = None  # the class that the config asks for


class Report(NamedTuple):
    title: str
    facts: list[tuple[str, str]]
    charts: list[Chart]
    rows: list[Row]


LEGEND = [
    (Group(True, True, [Piece("mask", "word")]), "masked: the model sees [MASK]"),
    (
        Group(True, True, [Piece("random", "word", "other")]),
        "random: the model sees other",
    ),
    (Group(True, True, [Piece("kept", "word")]), "kept: the model sees word"),
    (
        Group(
            True,
            True,
            [
                Piece("mask", "a"),
                Piece("mask", "long", joint=" "),
                Piece("mask", "er", joint="·"),
                Piece("mask", "unit", joint=" "),
            ],
        ),
        "one unit, hidden as a whole; · joins the pieces of a word",
    ),
    (
        Group(True, False, [Piece("mask", "word")]),
        "hidden but not predicted; all others are predicted",
    ),
    (
        Group(False, False, [Piece("special", "[SEP]")]),
        "special token, never hidden; a new segment is a new paragraph",
    ),
]

# On a terminal: predicted, and hidden only.
STYLES = {
    "text": ("", ""),
    "special": ("2", "2"),
    "mask": ("97;44", "4;34"),
    "random": ("30;43", "4;33"),
    "kept": ("30;42", "4;32"),
}
MARKS = {"mask": "", "random": "", "kept": "≡"}
BRACKETS = {True: "⟦⟧", False: "‹›"}
# A mark in the text itself gets a backslash before it.
ESCAPES = str.maketrans({mark: f"\\{mark}" for mark in "⟦⟧‹›≡→·\\"})
BAR_CHARACTERS = 36


def text(report: Report, *, color, width):
    """Returns the report as lines of at most `width` characters where words allow."""
    lines = [_styled(report.title, "1", color), ""]
    for group, meaning in LEGEND:
        (sample,) = _wrap([group], color, width)
        room = max(16 - len(_wrap([group], False, width)[0]), 0)
        lines.append(f"  {sample}{' ' * room}  {meaning}")
    for row in report.rows:
        lines += ["", _styled(row.title, "1", color)]
        for segment in row.segments:
            lines += [f"  {line}" for line in _wrap(segment, color, width - 2)]
    lines.append("")
    for name, fact in report.facts:
        words = [[(word, "")] for word in fact.split(" ")]
        first, *rest = _fill(words, color, width - 12)
        lines += [f"{name:>9}   {first}", *(f"{'':12}{line}" for line in rest)]
    for chart in report.charts:
        lines += ["", _styled(chart.title, "1", color), *_bars(chart)]
    return "\n".join(lines)


def _bars(chart: Chart):
    total, top = max(sum(chart.counts), 1), max(*chart.counts, 1)
    for i, (label, count) in enumerate(zip(chart.labels, chart.counts, strict=True)):
        bar = "█" * round(BAR_CHARACTERS * count / top)
        note = f"  asked {chart.asked[i]:.1%}" if chart.asked else ""
        note += "  ◂ asked" if i == chart.marked else ""
        yield f"{label:>14} {_share(count, total):>6} {bar}{note}"


def _share(count, total):
    share = f"{count / total:.1%}"
    return "<0.1%" if count and share == "0.0%" else share


def _styled(text, style, color):
    return f"\x1b[{style}m{text}\x1b[0m" if color and style else text


def _wrap(groups, color, width):
    words: list[list[tuple[str, str]]] = [[]]
    for is_hidden, is_predicted, pieces in groups:
        for i, piece in enumerate(pieces):
            style = STYLES[piece.kind][not is_predicted]
            if piece.joint == " ":
                words.append([])
            shown = MARKS.get(piece.kind, "") + piece.text.translate(ESCAPES)
            if piece.seen:
                shown += f"→{piece.seen_joint}{piece.seen.translate(ESCAPES)}"
            shown = shown if piece.joint == " " else piece.joint + shown
            if is_hidden and i == 0:
                shown = BRACKETS[is_predicted][0] + shown
            if is_hidden and i == len(pieces) - 1:
                shown += BRACKETS[is_predicted][1]
            words[-1].append((shown, style))
    return _fill([word for word in words if word], color, width)


def _fill(words, color, width):
    """Returns lines of words, which are lists of (text, style)."""
    lines, used = [""], 0
    for word in words:
        size = sum(len(text) for text, _ in word)
        if used and used + 1 + size > width:
            lines.append("")
            used = 0
        lines[-1] += " " * (used > 0)
        lines[-1] += "".join(_styled(text, style, color) for text, style in word)
        used += size + (used > 0)
    return lines


STYLE = """
:root { --ink: #1b2733; --dim: #6b7785; --line: #d9dfe6; --mask: #1f4e8c;
  --random: #c2410c; --kept: #15803d; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 4rem; color: var(--ink);
  background: #f6f8fa; font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .75rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
section, article { background: #fff; border: 1px solid var(--line);
  border-radius: .5rem; padding: .75rem 1rem; }
article { margin: .75rem 0; }
h3 { font-size: .85rem; font-weight: 600; color: var(--dim); margin: 0; }
article p { line-height: 2.1; margin: .25rem 0 0; overflow-wrap: anywhere; }
article p + p { border-top: 1px dashed var(--line); padding-top: .25rem; }
dl { display: grid; grid-template-columns: auto 1fr; gap: .3rem 1rem; margin: 0; }
dt { color: var(--dim); }
dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
.legend { align-items: baseline; }
.special { color: #9aa5b1; font-size: .75em; }
.unit { border: 1.5px solid var(--ink); border-radius: .35rem; padding: .12em .15em;
  margin: 0 .08em; background: #e8edf3; -webkit-box-decoration-break: clone;
  box-decoration-break: clone; }
.unit.silent { border-style: dashed; background: none; }
.unit b { font-weight: 500; padding: .05em .2em; border-radius: .2rem; }
.mask { background: var(--mask); color: #fff; }
.random { background: #ffedd5; color: var(--random); white-space: nowrap; }
.random s { opacity: .75; }
.kept { background: #dcfce7; color: var(--kept); }
.silent b { background: none; }
.silent .mask { color: var(--mask); }
.silent .random { color: var(--random); }
.charts { display: grid; gap: .75rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
svg { display: block; width: 100%; max-width: 30rem; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
rect { fill: var(--mask); }
line { stroke: var(--random); stroke-width: 2.5; }
svg .asked { fill: var(--random); font-weight: 600; }
"""


def page(report: Report):
    """Returns the report as HTML that needs no other file."""
    title = html.escape(report.title)
    facts = "".join(_entry(name, html.escape(fact)) for name, fact in report.facts)
    legend = "".join(_entry(_mark(g), html.escape(meaning)) for g, meaning in LEGEND)
    charts = "".join(
        f"<section><h3>{html.escape(chart.title)}</h3>{_svg(chart)}</section>"
        for chart in report.charts
    )
    rows = "".join(
        f"<article><h3>{html.escape(row.title)}</h3>"
        + "".join(f"<p>{''.join(map(_mark, groups))}</p>" for groups in row.segments)
        + "</article>\n"
        for row in report.rows
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body><h1>{title}</h1>\n"
        f"<section><dl>{facts}</dl></section>\n"
        f'<h2>Legend</h2><section><dl class="legend">{legend}</dl></section>\n'
        f"<h2>Rows</h2>\n{rows}"
        f'<h2>Statistics</h2><div class="charts">{charts}</div>\n</body></html>\n'
    )


def _entry(term, definition):
    return f"<dt>{term}</dt><dd>{definition}</dd>"


def _mark(group: Group):
    pieces = [_mark_piece(piece) for piece in group.pieces]
    if not group.is_hidden:
        return "".join(joint + body for joint, body in pieces)
    first, *rest = pieces
    body = first[1] + "".join(joint + body for joint, body in rest)
    silent = "" if group.is_predicted else " silent"
    return f'{first[0]}<span class="unit{silent}">{body}</span>'


def _mark_piece(piece: Piece):
    body = html.escape(piece.text)
    if piece.kind == "special":
        body = f'<span class="special">{body}</span>'
    elif piece.kind == "random":
        seen = piece.seen_joint + html.escape(piece.seen)
        body = f'<b class="random"><s>{body}</s> → {seen}</b>'
    elif piece.kind != "text":
        body = f'<b class="{piece.kind}">{body}</b>'
    return piece.joint, body


def _svg(chart: Chart):
    """Returns bars with their share; a line where the share asked for would end."""
    total = max(sum(chart.counts), 1)
    top = max([count / total for count in chart.counts] + chart.asked) or 1
    parts = []
    for i, (label, count) in enumerate(zip(chart.labels, chart.counts, strict=True)):
        y = 24 * i
        note = _share(count, total)
        end = 104 + 170 * count / total / top
        parts.append(f'<rect x="104" y="{y + 3}" width="{end - 104:.1f}" height="18"/>')
        if chart.asked:
            x = 104 + 170 * chart.asked[i] / top
            end = max(end, x)
            note += f" (asked {chart.asked[i]:.1%})"
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 24}"/>')
        if i == chart.marked:
            note += " ◂ asked"
        style = ' class="asked"' if i == chart.marked else ""
        parts.append(
            f'<text x="96" y="{y + 16}" text-anchor="end"{style}>{html.escape(label)}'
            f'</text><text x="{end + 6:.1f}" y="{y + 16}"{style}>{html.escape(note)}'
            "</text>"
        )
    height = 24 * len(chart.counts)
    name = html.escape(chart.title, quote=True)
    return (
        f'<svg viewBox="0 0 430 {height}" role="img" aria-label="{name}">'
        f"{''.join(parts)}</svg>"
    )
