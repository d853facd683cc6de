"""Record a command as an animated SVG: python tools/record_demo.py docs/images/demo.svg [COMMAND …].

The command (default: make annotate) runs once. Each line of its output appears in the picture in order and, sped up, at
the time at which it was printed. The picture ends complete, and stays so for readers without animation.
"""

import re
import subprocess
import sys
import time
from html import escape
from pathlib import Path

SHOWN_S = 14.0
"""How long the whole recording plays."""
COLUMNS, LINE_PX, CHARACTER_PX = 132, 17, 7.3
LONGEST_PAUSE_S = 4.0
"""Longer pauses of the command, such as the engine's start, are cut to this."""


def record(command: list[str]) -> list[tuple[float, str]]:
    """Return (seconds, line) for each line that the command prints. Its paths are shown from the repository on."""
    began_s, lines = time.monotonic(), []
    here = str(Path.cwd())
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line.rstrip("\n")).replace(here, ".")
            if lines and "loading model" in text and "loading model" in lines[-1][1]:
                lines.pop()  # of the engine's start, the last line is enough
            lines.append((time.monotonic() - began_s, text))
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return lines


def draw(command: list[str], lines: list[tuple[float, str]]) -> str:
    """Return the SVG."""
    at_s, played_s, before_s = [], 0.0, 0.0
    for second, _ in lines:
        played_s += min(second - before_s, LONGEST_PAUSE_S)
        before_s = second
        at_s.append(played_s)
    scale = SHOWN_S / max(played_s, 1.0)
    height = LINE_PX * (len(lines) + 3)
    width = COLUMNS * CHARACTER_PX + 24
    rows = [(0.0, f"$ {' '.join(command)}")] + [
        (s * scale, text) for s, (_, text) in zip(at_s, lines, strict=True)
    ]
    texts = [
        f'<text x="12" y="{LINE_PX * (index + 2)}" style="animation-delay:{second:.2f}s" '
        f'class="{"prompt" if index == 0 else "line"}">{escape(text[:COLUMNS])}</text>'
        for index, (second, text) in enumerate(rows)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img" '
            f'aria-label="A recording of {escape(" ".join(command))}">',
            "<style>text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #e6e6e6; white-space: pre; "
            "animation: show 0.05s both } .prompt { fill: #8ae234 } @keyframes show { from { opacity: 0 } }</style>",
            f'<rect width="100%" height="{height}" rx="6" fill="#1e1e1e"/>',
            *texts,
            "</svg>\n",
        ]
    )


def main() -> None:
    command = sys.argv[2:] or ["make", "annotate"]
    Path(sys.argv[1]).write_text(draw(command, record(command)), encoding="utf-8")


if __name__ == "__main__":
    main()
