"""Draw the diagrams of "How it works": python tools/draw_diagrams.py docs/images.

Each function returns one SVG: the life of a row, the life of a KV block, and mixed batches next to separated phases.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

BLUE, ORANGE, GREEN, PURPLE, GREY = "#4c78a8", "#f58518", "#54a24b", "#b279a2", "#777"
INK = "#222"


def svg(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
            f'font-size="14" role="img" aria-label="{label}">',
            '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto">'
            '<path d="M0,0 L6,3 L0,6 z" fill="#555"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def words(
    x: float, y: float, text: str, *, anchor: str = "start", bold: bool = False, color: str = INK
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{color}"{weight}>{text}</text>'


def box(
    x: float, y: float, width: float, height: float, color: str, lines: Sequence[str], *, faint: bool = False
) -> str:
    fill = f'fill="{color}" fill-opacity="0.2" stroke="{color}"' if faint else f'fill="{color}"'
    first = y + height / 2 + 5 - 9 * (len(lines) - 1)
    texts = [
        words(x + width / 2, first + 18 * index, line, anchor="middle", color=INK if faint else "#fff")
        for index, line in enumerate(lines)
    ]
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" {fill}/>' + "".join(texts)


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#555" stroke-width="1.6" marker-end="url(#tip)"/>'


def row() -> str:
    """Return the life of a row, from left to right, under the process in which each part happens."""
    lanes = ((10, 210, "driver"), (226, 250, "executor: Spark task"), (482, 268, "executor: engine server"))
    parts = []
    for x, width, name in lanes:
        parts.append(f'<rect x="{x}" y="10" width="{width}" height="370" rx="8" fill="#f4f4f6"/>')
        parts.append(words(x + width / 2, 34, name, anchor="middle", bold=True))
    parts += [
        box(26, 50, 178, 54, GREY, ("1 which rows are left?", "claim the output")),
        box(26, 140, 178, 54, BLUE, ("2 a chunk of slices", "is a Spark job")),
        box(26, 310, 178, 54, BLUE, ("7 one append", "commits the chunk")),
        box(242, 140, 218, 54, ORANGE, ("3 sends rows", "as far as credit reaches")),
        box(242, 310, 218, 54, ORANGE, ("6 keeps completions every 10 s,", "joins them with the rows")),
        box(498, 140, 236, 54, GREEN, ("4 checks and tokenizes", "a bad row ends as an error row")),
        box(498, 225, 236, 54, GREEN, ("5 vLLM computes the answer", "among thousands of others")),
        arrow(115, 106, 115, 136),
        arrow(206, 167, 238, 167),
        arrow(462, 167, 494, 167),
        arrow(616, 196, 616, 221),
        '<polyline points="616,281 616,337 464,337" fill="none" stroke="#555" stroke-width="1.6" '
        'marker-end="url(#tip)"/>',
        arrow(238, 337, 208, 337),
    ]
    return svg(760, 390, "A row goes from the input through a task and the engine server to a commit", parts)


def kv_block() -> str:
    """Return the places of a KV block: computed, stored, freed, prefetched, used."""
    parts = [
        f'<rect x="10" y="10" width="740" height="130" rx="8" fill="{BLUE}" fill-opacity="0.08"/>',
        words(26, 34, "GPU memory", bold=True),
        f'<rect x="10" y="200" width="740" height="100" rx="8" fill="{GREEN}" fill-opacity="0.08"/>',
        words(26, 288, "Host memory: a complete copy of every block", bold=True),
        box(40, 56, 130, 56, BLUE, ("1 computed", "by a step")),
        box(230, 56, 130, 56, BLUE, ("3 freed:", "no copy needed"), faint=True),
        box(420, 56, 130, 56, PURPLE, ("4 prefetched", "one step ahead")),
        box(600, 56, 130, 56, BLUE, ("5 used", "by the next step")),
        box(40, 212, 690, 46, GREEN, ("the block's copy on the host stays until the request has ended (6)",)),
        arrow(105, 114, 105, 208),
        words(114, 166, "2 stored behind other batches' steps"),
        arrow(485, 208, 485, 116),
        words(494, 166, "copied while another batch computes"),
        arrow(172, 84, 226, 84),
        arrow(362, 84, 416, 84),
        arrow(552, 84, 596, 84),
    ]
    return svg(
        760, 310, "A KV block is computed, stored on the host, freed on the GPU, prefetched and used", parts
    )


def mixed() -> str:
    """Return a GPU's steps with separated phases and with mixed batches."""
    parts = [
        words(10, 30, "separated", bold=True),
        words(10, 48, "phases, as in the paper", color=GREY),
        words(10, 160, "mixed", bold=True),
        words(10, 178, "decodes, then prompts", color=GREY),
        words(10, 196, "up to a maximum of tokens", color=GREY),
    ]
    left, top = 210, 14
    for index in range(3):
        parts.append(box(left + 62 * index, top, 58, 66, ORANGE, ("prompts",)))
    for index in range(6):
        parts.append(box(left + 190 + 58 * index, top + 40, 54, 26, BLUE, ("decode",)))
    parts.append(words(left + 190, top + 24, "arithmetic idle while decoding", color=GREY))
    for index in range(7):
        x = left + 77 * index
        parts.append(box(x, 144, 73, 30, ORANGE, ("prompts",)))
        parts.append(box(x, 176, 73, 26, BLUE, ("decode",)))
    parts.append(words(left, 232, "one GPU, step after step →", color=GREY))
    return svg(760, 244, "Separated phases and mixed steps on one GPU", parts)


def packages() -> str:
    """Return the packages, in the processes in which they run."""
    parts = [
        f'<rect x="10" y="10" width="230" height="290" rx="8" fill="{BLUE}" fill-opacity="0.08"/>',
        words(125, 34, "Spark driver", anchor="middle", bold=True),
        f'<rect x="256" y="10" width="620" height="290" rx="8" fill="{ORANGE}" fill-opacity="0.08"/>',
        words(566, 34, "Spark executor, one for each GPU node", anchor="middle", bold=True),
        f'<rect x="486" y="46" width="376" height="240" rx="8" fill="{GREEN}" fill-opacity="0.12"/>',
        words(674, 66, "engine server process", anchor="middle", bold=True),
        box(26, 50, 198, 50, BLUE, ("job/", "what is left, chunks, commits")),
        box(26, 140, 198, 50, BLUE, ("storage/", "tables, fence")),
        box(26, 230, 198, 50, BLUE, ("monitor/", "collector, progress, report")),
        box(272, 140, 160, 50, ORANGE, ("executor/", "task, feed, spool")),
        box(500, 80, 164, 50, GREEN, ("serve/, replicas/", "sessions, credit, rows")),
        box(500, 156, 164, 50, GREEN, ("api.py", "one engine")),
        box(500, 226, 164, 50, GREEN, ("vllm_ext/", "scheduler, workers")),
        box(700, 156, 150, 50, PURPLE, ("control/", "what to run, prefetch")),
        box(700, 226, 150, 50, PURPLE, ("transfer/", "KV, GPU ↔ host")),
        arrow(125, 102, 125, 136),
        arrow(226, 80, 290, 136),
        arrow(434, 160, 496, 110),
        words(440, 120, "Arrow", color=GREY),
        arrow(582, 132, 582, 152),
        arrow(582, 208, 582, 222),
        arrow(666, 240, 696, 200),
        arrow(666, 251, 696, 251),
        arrow(498, 270, 228, 262),
        words(270, 256, "statistics every 2 s", color=GREY),
    ]
    return svg(886, 310, "The packages, and the processes in which they run", parts)


if __name__ == "__main__":
    for draw in (row, kv_block, mixed, packages):
        (Path(sys.argv[1]) / f"{draw.__name__}.svg").write_text(draw(), encoding="utf-8")
