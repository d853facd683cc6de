"""Write the parts of a run's page as HTML: tables, tiles, excerpts and bars, and the page's style.

Each function escapes what it is given. Long words, such as paths, may break only after a separator; a word of a
language never does. This module knows nothing of runs.
"""

import re
from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --soft: #626262; --line: #ddd; --block: #f6f6f4;
  --bad: #a81e1e; --bar: #1f77b4; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e4e2; --paper: #17191c; --soft: #a3a6aa; --line: #3b3f45;
  --block: #202327; --bad: #ff8a80; --bar: #6cb0e4; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  max-width: 64rem; padding: 1rem; }
h1 { font-size: 1.4rem; line-height: 1.3; margin: 0.2rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem; }
h3 { font-size: 0.95rem; margin: 1rem 0 0.3rem; } p { margin: 0.4rem 0; }
.soft { color: var(--soft); } .bad { color: var(--bad); }
.tiles { display: flex; flex-wrap: wrap; gap: 0.6rem; margin: 1rem 0; }
.tile { border: 1px solid var(--line); border-radius: 6px; padding: 0.4rem 0.8rem; }
.tile b { display: block; font-size: 1.25rem; } .tile span { color: var(--soft); font-size: 0.85rem; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 0.25rem 1rem; margin: 0.6rem 0; }
dt { color: var(--soft); } dd { margin: 0; white-space: pre-wrap; overflow-wrap: break-word; }
.scroll { overflow-x: auto; background-repeat: no-repeat; background-image:
  linear-gradient(to left, var(--paper) 40%, transparent), linear-gradient(to left, var(--line), transparent);
  background-position: 100% 0; background-size: 2rem 100%, 0.6rem 100%; background-attachment: local, scroll; }
table { border-collapse: collapse; }
td, th { text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
td, th { padding: 0.25rem 0.9rem 0.25rem 0; }
th { color: var(--soft); font-weight: normal; }
td.part { white-space: nowrap; } td.n, th.n { white-space: nowrap; text-align: right; } tr.now td { font-weight: bold; }
.row { border: 1px solid var(--line); border-radius: 6px; margin: 0.6rem 0; padding: 0.5rem 0.8rem; }
.pair { display: grid; grid-template-columns: minmax(0, 3fr) minmax(0, 2fr); gap: 0.3rem 1rem; }
.text { background: var(--block); border-radius: 4px; margin: 0.2rem 0; max-height: 11rem; overflow: auto;
  padding: 0.4rem 0.6rem; white-space: pre-wrap; overflow-wrap: break-word; }
.name { color: var(--soft); font-size: 0.85rem; }
.bar { display: flex; height: 1.6rem; border-radius: 4px; overflow: hidden; margin-bottom: 0.5rem; }
.key { display: inline-block; width: 0.8rem; height: 0.8rem; border-radius: 2px; margin-right: 0.4rem; }
.share { display: block; width: 12rem; height: 1.1rem; margin-top: 0.2rem; } .share rect { fill: var(--bar); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); gap: 0.5rem 1.5rem; }
.chart svg { color: inherit; width: 100%; height: auto; } .chart svg > rect:first-child { fill: none; }
.wide svg { min-width: 42rem; }
@media (max-width: 42rem) { .pair { grid-template-columns: minmax(0, 1fr); } .more { display: none; }
  td, th { padding-right: 0.5rem; } table { font-size: 0.9rem; }
  dl { grid-template-columns: minmax(0, 1fr); gap: 0; } dd { margin-bottom: 0.5rem; } .share { width: 6rem; } }
@media print { .text { max-height: none; } }
"""
_SEPARATOR = re.compile(r"(?<=[/_.,:;=&?@\\])(?=[^\s/])")


def breakable(text: str) -> str:
    """Return the text, escaped, which may break after separators of its long words."""
    return "".join(
        "<wbr>".join(map(escape, _SEPARATOR.split(word))) if len(word) > 20 else escape(word)
        for word in re.split(r"(\s+)", text)
    )


def tiles(shown: Iterable[tuple[str, str]]) -> str:
    """Return a box for each (value, what it is)."""
    boxes = (
        f"<div class='tile'><b>{escape(value)}</b><span>{escape(name)}</span></div>" for value, name in shown
    )
    return f"<div class='tiles'>{''.join(boxes)}</div>"


def facts(named: Iterable[tuple[str, str]]) -> str:
    """Return a list of names and texts."""
    entries = (f"<dt>{escape(name)}</dt><dd>{breakable(text)}</dd>" for name, text in named)
    return f"<dl>{''.join(entries)}</dl>"


def numbers_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    less_important: Sequence[str] = (),
    bold_row: int | None = None,
) -> str:
    """Return a table of numbers.

    The columns named in ``less_important`` are not shown on a narrow screen. The row numbered ``bold_row`` is bold.
    """
    kinds = ["n more" if name in less_important else "n" for name in head]

    def cells(tag: str, texts: Sequence[str]) -> str:
        return "".join(
            f"<{tag} class='{kind}'>{escape(text)}</{tag}>" for kind, text in zip(kinds, texts, strict=True)
        )

    body = "".join(
        f"<tr{' class=now' if number == bold_row else ''}>{cells('td', row)}</tr>"
        for number, row in enumerate(rows)
    )
    return f"<div class='scroll'><table><tr>{cells('th', head)}</tr>{body}</table></div>"


def text_block(name: str, text: str, *, left_out: int = 0, is_bad: bool = False) -> str:
    """Return a text under its name, as it was written; ``left_out`` is the number of characters that it goes on."""
    rest, dots = (f", without its last {left_out:,} characters", "…") if left_out else ("", "")
    mark = " bad" if is_bad else ""
    return (
        f"<div><div class='name'>{escape(name)}{rest}</div>"
        f"<div class='text{mark}'>{escape(text)}{dots}</div></div>"
    )


def share_bar(share: float) -> str:
    """Return a bar that fills this share of its width."""
    return (
        "<svg class='share' viewBox='0 0 100 10' preserveAspectRatio='none' aria-hidden='true'>"
        f"<rect width='{100 * share:.1f}' height='10'/></svg>"
    )


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 600:
        return "{} min {} s".format(*divmod(round(seconds), 60))
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
