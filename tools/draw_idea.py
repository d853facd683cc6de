"""Draw the picture of PipeMax's idea in the README: python tools/draw_idea.py docs/images/idea.svg."""

import sys
from pathlib import Path

COLORS = {"A": "#4c78a8", "B": "#f58518", "C": "#54a24b", "D": "#b279a2"}
STEPS = ("A", "B", "C", "D", "A", "B")
LEFT, SLOT, GAP = 190, 108, 6
COMPUTE_Y, MEMORY_Y, HOST_Y = 58, 128, 262
WIDTH, HEIGHT = LEFT + len(STEPS) * SLOT + 24, 352


def box(
    x: float, y: float, width: float, height: float, batch: str, label: str, *, arriving: bool = False
) -> str:
    style = (
        f'fill="{COLORS[batch]}" fill-opacity="0.25" stroke="{COLORS[batch]}" stroke-dasharray="5 3"'
        if arriving
        else f'fill="{COLORS[batch]}"'
    )
    ink = "#222" if arriving else "#fff"
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" {style}/>'
        f'<text x="{x + width / 2}" y="{y + height / 2 + 5}" text-anchor="middle" fill="{ink}">{label}</text>'
    )


def note(x: float, y: float, words: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}" fill="#222">{words}</text>'


def draw() -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="14" role="img" aria-label="While a batch computes, the KV of the next comes from host memory">',
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto">'
        '<path d="M0,0 L6,3 L0,6 z" fill="#555"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        note(LEFT, 34, "one GPU of the pipeline, step after step →"),
        note(16, COMPUTE_Y + 25, "GPU computes", weight="bold"),
        note(16, MEMORY_Y + 36, "GPU memory", weight="bold"),
        note(16, MEMORY_Y + 54, "holds two batches"),
        note(16, HOST_Y + 26, "Host memory", weight="bold"),
        note(16, HOST_Y + 44, "holds the KV of all"),
    ]
    for index, batch in enumerate(STEPS):
        x, width = LEFT + index * SLOT, SLOT - GAP
        following = list(COLORS)[(index + 1) % len(COLORS)]
        parts.append(box(x, COMPUTE_Y, width, 38, batch, f"batch {batch}"))
        parts.append(box(x, MEMORY_Y, width, 34, batch, f"KV of {batch}"))
        parts.append(box(x, MEMORY_Y + 40, width, 34, following, f"KV of {following} ↑", arriving=True))
        arrow_x = x + width / 2
        parts.append(
            f'<line x1="{arrow_x}" y1="{HOST_Y - 4}" x2="{arrow_x}" y2="{MEMORY_Y + 82}" stroke="#555" '
            'stroke-width="1.6" marker-end="url(#tip)"/>'
        )
    parts.append(note(16, HOST_Y - 22, "prefetched just in time"))
    share = (len(STEPS) * SLOT - GAP) / len(COLORS)
    parts += [
        box(LEFT + index * share, HOST_Y, share - GAP, 50, batch, f"KV of batch {batch}")
        for index, batch in enumerate(COLORS)
    ]
    parts.append(
        note(LEFT, HOST_Y + 76, "Leaving the GPU costs nothing: the copy in host memory is always complete.")
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(), encoding="utf-8")
