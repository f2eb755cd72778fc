"""A document of text, tables and pictures, as one HTML page and as Markdown.

The page needs no other file and runs no script; Markdown names its pictures' files.
"""

import base64
import html
from typing import NamedTuple


class Text(NamedTuple):
    text: str
    kind: str = "p"  # p, lead, title, note, warning


class Cell(NamedTuple):
    text: str
    verdict: str = ""  # better, worse


class Table(NamedTuple):
    """The first column names a row; all others are figures, or words if `is_wordy`."""

    header: list[str]
    rows: list[list[str | Cell]]
    is_wordy: bool = False


class Picture(NamedTuple):
    name: str  # of its files
    caption: str


Block = Text | Table | Picture


class Section(NamedTuple):
    key: str
    title: str
    blocks: list[Block]


STYLE = """
:root { --ink: #1b2733; --dim: #5b6775; --line: #d9dfe6; --back: #f6f8fa;
  --accent: #1f4e8c; --better: #15803d; --worse: #c2410c; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem 1rem 4rem; color: var(--ink);
  background: var(--back); font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.25rem 0 .6rem; }
p { max-width: 46rem; margin: .5rem 0; overflow-wrap: anywhere; }
nav { font-size: .9rem; margin: .75rem 0 0; display: flex; flex-wrap: wrap;
  gap: .15rem .9rem; }
a { color: var(--accent); }
.lead { font-size: 1.1rem; white-space: pre-line; }
.title { font-weight: 600; margin-top: 1.25rem; }
.note { color: var(--dim); font-size: .9rem; }
.warning { background: #fff7ed; border-left: 4px solid var(--worse);
  padding: .4rem .8rem; border-radius: 0 .3rem .3rem 0; }
.table { overflow-x: auto; background: #fff; border: 1px solid var(--line);
  border-radius: .5rem; max-width: 100%; }
table { border-collapse: collapse; font-size: .9rem; line-height: 1.35; }
th, td { padding: .4rem .7rem; text-align: right; white-space: nowrap;
  vertical-align: top;
  font-variant-numeric: tabular-nums; }
th { color: var(--dim); font-weight: 600;
  border-bottom: 1px solid var(--line); }
tr + tr > * { border-top: 1px solid #eef1f4; }
th:first-child { text-align: left; }
tbody th { color: var(--ink); position: sticky; left: 0; background: #fff;
  border-bottom: none; }
.wordy th, .wordy td { text-align: left; }
.wordy td { white-space: normal; min-width: 7rem; overflow-wrap: anywhere; }
.better { color: var(--better); font-weight: 600; }
.worse { color: var(--worse); font-weight: 600; }
.beside { display: flex; flex-wrap: wrap; gap: .9rem; align-items: flex-start;
  margin: .75rem 0; }
figure { flex: 1 1 26rem; margin: 0; background: #fff; border: 1px solid var(--line);
  border-radius: .5rem; padding: .75rem; max-width: min(36.5rem, 100%); }
figure img { display: block; width: 100%; height: auto; }
figcaption { color: var(--dim); font-size: .9rem; margin-top: .5rem; }
.interval { display: block; color: var(--dim); font-weight: 400; font-size: .85em; }
@media (max-width: 40rem) { table { font-size: .85rem; }
  th, td { padding: .35rem .45rem; }
  tbody th { white-space: normal; min-width: 5.5rem; max-width: 40vw; } }
@media print { body { background: #fff; } figure, .table { break-inside: avoid; } }
"""


def to_html(
    title: str,
    sections: list[Section],
    pictures: dict[str, bytes],
    style: str = STYLE,
) -> str:
    """Returns the page; `pictures` are SVG."""
    links = "".join(
        f'<a href="#{section.key}">{_escape(section.title)}</a>'
        for section in sections
        if section.title
    )
    body = "".join(_section(section, pictures) for section in sections[1:])
    head = "".join(_blocks(sections[0].blocks, pictures))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_escape(title)}</title><style>{style}</style></head>\n<body>"
        f"<header><h1>{_escape(title)}</h1>\n{head}<nav>{links}</nav></header>\n"
        f"{body}</body></html>\n"
    )


def _section(section, pictures):
    blocks = "".join(_blocks(section.blocks, pictures))
    return (
        f'<section id="{section.key}"><h2>{_escape(section.title)}</h2>\n'
        f"{blocks}</section>\n"
    )


def _blocks(blocks, pictures):
    """Yields blocks; pictures and tables that follow each other stand side by side,
    where there is room."""
    beside: list[str] = []
    for block in [*blocks, None]:
        if isinstance(block, Picture):
            beside.append(_figure(block, pictures[block.name]))
        elif isinstance(block, Table):
            beside.append(_table(block))
        else:
            if beside:
                yield f'<div class="beside">{"".join(beside)}</div>\n'
                beside = []
            if block:
                kind = "" if block.kind == "p" else f' class="{block.kind}"'
                yield f"<p{kind}>{_escape(block.text)}</p>\n"


def _figure(picture, svg):
    # As an image: names inside one SVG cannot meet those of another.
    data = base64.b64encode(svg).decode()
    caption = _escape(picture.caption)
    return (
        f'<figure id="picture-{picture.name}"><img alt="{caption}" '
        f'src="data:image/svg+xml;base64,{data}"><figcaption>{caption}</figcaption>'
        "</figure>"
    )


def _table(table):
    header = "".join(f"<th>{_value(name)}</th>" for name in table.header)
    rows = "".join(f"<tr>{_row(row)}</tr>\n" for row in table.rows)
    kind = " wordy" if table.is_wordy else ""
    return (
        f'<div class="table{kind}"><table><thead><tr>{header}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>\n"
    )


def _row(row):
    name, *cells = map(_cell, row)
    may_break = _escape(name.text).replace(",", ",<wbr>").replace("_", "_<wbr>")
    return f"<th>{may_break}</th>" + "".join(
        f'<td class="{cell.verdict}">{_value(cell.text)}</td>'
        if cell.verdict
        else f"<td>{_value(cell.text)}</td>"
        for cell in cells
    )


def _cell(value):
    return value if isinstance(value, Cell) else Cell(value)


def _value(text):
    """Puts an interval under its mean."""
    first, bracket, rest = _escape(text).partition(" [")
    return f'{first} <span class="interval">[{rest}</span>' if bracket else first


def _escape(text):
    return html.escape(text, quote=True)


def to_markdown(title: str, sections: list[Section]) -> str:
    lines = [f"# {title}"]
    for section in sections:
        if section.title:
            lines.append(f"## {section.title}")
        lines += [_markdown(block) for block in section.blocks]
    return "\n\n".join(lines) + "\n"


def _markdown(block):
    match block:
        case Text(text, "warning"):
            return f"> **Note:** {_plain(text)}"
        case Text(text, "title"):
            return f"### {_plain(text)}"
        case Text(text, _):
            return _plain(text)
        case Picture(name, caption):
            return f"![{_plain(caption)}]({name}.svg)"
        case Table(header, rows, is_wordy):
            rules = ["---"] + ["---" if is_wordy else "---:"] * (len(header) - 1)
            return "\n".join(_markdown_row(row) for row in [header, rules, *rows])
    raise TypeError(f"{block!r} is no block.")


def _markdown_row(row):
    texts = [
        f"**{_plain(cell.text)}**" if cell.verdict else _plain(cell.text)
        for cell in map(_cell, row)
    ]
    return f"| {' | '.join(texts)} |"


def _plain(text):
    """Escapes what Markdown and HTML in it would read as a mark."""
    for mark in "\\|<*_[]`":
        text = text.replace(mark, f"\\{mark}")
    return text
