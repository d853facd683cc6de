"""Compare the layout that an engine chooses with every layout run in full, in simulation.

    python -m bench.layouts [--rows 6000] [--only NODE,MODEL,WORKLOAD] [--json FILE]

For each node and model: the choice (``pipemax.policy.layout_choice``) from 1,500 sampled rows, and every layout
over ``--rows`` rows with every policy and size of a step. It prints Markdown; ``--json`` keeps a list of objects:

    chosen              the layout
    tokens_per_s        of the chosen layout with its best policy, over all rows
    best                the best layout over all rows, and its ``best_tokens_per_s``
    of_best             tokens_per_s / best_tokens_per_s (goal: 0.97)
    cpu_s               CPU seconds of the choice
    layouts             tokens/s of each layout over all rows
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from pipemax.cli.common import open_workload
from pipemax.policy.capacity import layout_refusal, options_of, possible_layouts
from pipemax.policy.layout_choice import SAMPLE_ROWS, FixedLayout, choose_layout
from pipemax.presets import load_model, load_node

NODES = ("l20x8", "rtx5090x8", "h100x8")
MODELS = ("qwen3-8b", "gpt-oss-120b", "qwen3-32b", "llama2-70b", "mixtral-8x7b", "qwen3-235b-a22b")
SETTINGS = [(node, model, "sharegpt") for node in NODES for model in MODELS]
COLUMNS = (
    "node",
    "model",
    "workload",
    "chosen",
    "tokens_per_s",
    "best",
    "best_tokens_per_s",
    "of_best",
    "cpu_s",
)


def run_setting(names: tuple[str, str, str], rows: int) -> dict[str, Any]:
    """Return the object for one setting; only its names and a ``refusal`` if the model fits in no layout."""
    node, model = load_node(names[0]), load_model(names[1])
    setting = dict(zip(("node", "model", "workload"), names, strict=True))
    sample = open_workload(names[2], rows)
    begin_s = time.process_time()
    try:
        choice = choose_layout(node, model, sample.first(SAMPLE_ROWS), rows=10 * rows, fixed=FixedLayout())
    except ValueError as error:
        return {**setting, "refusal": str(error)}
    cpu_s = time.process_time() - begin_s
    rates = {
        str(layout): max(
            option.tokens_per_s for option in options_of(node, model, layout, sample, rows=10 * rows)
        )
        for layout in possible_layouts(node)
        if layout_refusal(node, model, layout) is None
    }
    best = max(rates, key=rates.__getitem__)
    return {
        **setting,
        "rows": rows,
        "chosen": str(choice.layout),
        "tokens_per_s": round(rates[str(choice.layout)], 1),
        "best": best,
        "best_tokens_per_s": round(rates[best], 1),
        "of_best": round(rates[str(choice.layout)] / rates[best], 3),
        "cpu_s": round(cpu_s, 1),
        "layouts": {layout: round(rate, 1) for layout, rate in rates.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--only", action="append", help="node,model,workload: this setting only; repeatable")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    settings = SETTINGS
    if arguments.only:
        settings = [(node, model, load) for node, model, load in (one.split(",") for one in arguments.only)]
    print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS))
    entries: list[dict[str, Any]] = []
    for names in settings:
        entry = run_setting(names, arguments.rows)
        entries.append(entry)
        cells = [entry.get(name, "does not fit" if name == "chosen" else "") for name in COLUMNS]
        print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
