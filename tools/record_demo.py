"""Record a command as an animated SVG: python tools/record_demo.py docs/images/demo.svg 'COMMAND AS SHOWN' COMMAND….

The command runs once. Each line of its output appears in the picture in order and, sped up, at
the time at which it was printed; lines of progress follow each other in one place, as on a terminal. The picture ends
complete, and stays so for readers without animation.
"""

import re
import subprocess
import sys
import time
from html import escape
from itertools import pairwise
from pathlib import Path

SHOWN_S = 14.0
"""How long the whole recording plays."""
COLUMNS, LINE_PX, CHARACTER_PX = 132, 17, 7.3
LONGEST_PAUSE_S = 4.0
"""Longer pauses of the command, such as the engine's start, are cut to this."""
_PROGRESS = re.compile(r" +\d+:\d\d  ")


def record(command: list[str]) -> list[tuple[float, str]]:
    """Return (seconds, line) for each line that the command prints. Its paths are shown from the repository on."""
    began_s, lines = time.monotonic(), []
    here = str(Path.cwd())
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line.rstrip("\n")).replace(here, ".")
            lines.append((time.monotonic() - began_s, text))
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return lines


def draw(shown: str, lines: list[tuple[float, str]]) -> str:
    """Return the SVG."""
    at_s, played_s, before_s = [], 0.0, 0.0
    for second, _ in lines:
        played_s += min(second - before_s, LONGEST_PAUSE_S)
        before_s = second
        at_s.append(played_s)
    scale = SHOWN_S / max(played_s, 1.0)
    width = COLUMNS * CHARACTER_PX + 24
    rows = [(0.0, f"$ {shown}")] + [(s * scale, text) for s, (_, text) in zip(at_s, lines, strict=True)]
    texts, line = [], 1
    for (second, text), (next_second, next_text) in pairwise([*rows, (SHOWN_S, "")]):
        is_replaced = bool(_PROGRESS.match(text) and _PROGRESS.match(next_text))
        line += 0 if is_replaced else 1
        style = f"animation-delay:{second:.2f}s"
        if is_replaced:
            style += f";animation-duration:{next_second - second:.2f}s"
        kind = "replaced" if is_replaced else "prompt" if not texts else "line"
        y = LINE_PX * (line + is_replaced)
        texts.append(f'<text x="12" y="{y}" style="{style}" class="{kind}">{escape(text[:COLUMNS])}</text>')
    height = LINE_PX * (line + 2)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img" '
            f'aria-label="A recording of {escape(shown)}">',
            "<style>text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #e6e6e6; white-space: pre; "
            "animation: show 0.05s both } .prompt { fill: #8ae234 } .replaced { opacity: 0; animation-name: stay; "
            "animation-fill-mode: none } @keyframes show { from { opacity: 0 } } "
            "@keyframes stay { from, to { opacity: 1 } }</style>",
            f'<rect width="100%" height="{height}" rx="6" fill="#1e1e1e"/>',
            *texts,
            "</svg>\n",
        ]
    )


def main() -> None:
    file, shown, *command = sys.argv[1:]
    Path(file).write_text(draw(shown, record(command)), encoding="utf-8")


if __name__ == "__main__":
    main()
