"""Write the proof's summary: what became of each part, and the tables that it printed. Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PartEnd:
    name: str
    result: str
    """``passed``, ``failed``, ``ended`` (at the limit), ``skipped`` (cannot run here) or ``left out`` (no time)."""
    seconds: float | None = None
    note: str = ""

    @property
    def has_failed(self) -> bool:
        return self.result in ("failed", "ended")


def section(end: PartEnd, figures: str) -> str:
    """Return a part's section of the summary, in Markdown."""
    took = "" if end.seconds is None else f", {end.seconds:.0f} s"
    return f"\n## {end.name}: {end.result}{took}\n\n{end.note or '(no output)'}\n{figures}"


def overview(ends: Sequence[PartEnd]) -> str:
    """Return the table of all parts, in Markdown."""
    rows = [
        f"| {end.name} | {f'**{end.result}**' if end.has_failed else end.result} "
        f"| {'' if end.seconds is None else f'{end.seconds:.0f} s'} | {end.note} |"
        for end in ends
    ]
    head = "| part | result | time | last line of output, or reason |"
    return "\n".join(["\n## overview\n", head, "|---|---|---|---|", *rows, ""])


def last_line(output: str, says: str = "") -> str:
    """Return the last line that is neither empty nor of a table, and begins with ``says``, as a table's cell."""
    lines = [line.strip() for line in output.splitlines()]
    plain = [line for line in lines if line and not line.startswith(("|", "## "))]
    chosen = [line for line in plain if line.startswith(says)] or plain
    return chosen[-1].replace("|", "/")[:200] if chosen else ""


def tables(output: str) -> str:
    """Return the Markdown tables of a part's output with their titles, one level down."""
    lines = []
    for line in output.splitlines():
        if line.startswith("## "):
            lines += ["", f"#{line}", ""]
        elif line.startswith("|") and line.endswith("|"):
            lines.append(line)
    return "\n".join([*lines, ""])
