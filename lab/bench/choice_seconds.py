"""Time what ``auto`` simulates before an engine's first row: the choice of a layout, then of a policy in it.

    python -m lab.bench.choice_seconds [--only WORD ...] [--rows N] [--json FILE]

Each setting of the tables of results, and the nodes of lab/results/layouts.md: rows of the profile's lengths, of which
1,000 prompts and the outputs' mean are known, as of a sampled table. The engine of the policy's choice is as its
calibration would describe it on the simulated node. Seconds are of CPU: other processes on the same cores add to them.
``of_best`` is the choice's steady rate as a share of the fastest of lab/results/tables.jsonl, where PipeMax and stock
vLLM are done in the chosen layout. It prints Markdown; ``--json`` keeps the figures with the reasons.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.bench.auto_choice import measured_engine, name_of
from lab.bench.results.__main__ import FILE
from lab.bench.results.cells import System, steady_rate
from lab.bench.results.settings import GROUPS, Setting
from lab.bench.results.store import Store
from lab.bench.results.tables import drawing
from pipemax.config import RowLengths
from pipemax.domain.tuned import LAYOUT_SAMPLE_ROWS
from pipemax.policy.compare import ChosenPolicy
from pipemax.policy.layout_choice import FixedLayout, choose_layout
from pipemax.policy.layouts import Layout
from pipemax.policy.row_sample import choose_policy, draw_sample
from pipemax.presets import load_workload

NODES, MODELS = (
    ("h100x8", "rtx5090x8", "l20x8"),
    ("qwen3-8b", "gpt-oss-120b", "qwen3-32b", "llama2-70b", "mixtral-8x7b", "qwen3-235b-a22b"),
)
SETTINGS = (
    *(Setting(node=node, model=model) for node in NODES for model in MODELS),
    *(setting for settings in GROUPS.values() for setting in settings),
)
SAMPLED_PROMPTS, TABLE_ROWS = 1_000, 10_000_000
COLUMNS = ("setting", "layout", "policy", "tokens_per_s", "layout_cpu_s", "policy_cpu_s", "cpu_s", "of_best")


def run_setting(setting: Setting, rows: int) -> dict[str, Any]:
    """Return a line of the table. ``ValueError``: the model fits in no layout of the node."""
    node, model, profile = setting.node_spec(), setting.model_spec(), load_workload(setting.workload)
    drawn = setting.part_of_table(0, 1)
    lengths = RowLengths(
        prompt_tokens=tuple(drawn.prompt_tokens[:SAMPLED_PROMPTS].tolist()),
        shared_prefix_tokens=drawn.shared_prefix_tokens,
        max_tokens=int(drawn.output_tokens.max()),
        mean_output_tokens=float(drawn.output_tokens.mean()),
        rows=rows,
    )
    begin_s = time.process_time()
    sample = draw_sample(lengths, min(LAYOUT_SAMPLE_ROWS, rows), max_model_len=profile.context_tokens)
    choice = choose_layout(node, model, sample, fixed=FixedLayout())
    layout_cpu_s = time.process_time() - begin_s
    policy, reason, layout = "vllm_032", "one stage", choice.layout
    if layout.pipeline_parallel > 1:
        engine = measured_engine(
            node.part(layout.gpus_per_engine),
            model,
            layout.parallelism,
            max_model_len=profile.context_tokens,
        )
        decided = choose_policy(engine, lengths, chunk_is_free=True)
        policy, reason = name_of(decided), decided.reason
    cpu_s = time.process_time() - begin_s
    best = choice.best
    return {
        "setting": setting.name.replace("--", ", "),
        "layout": str(layout),
        "policy": policy,
        "tokens_per_s": None if best is None else round(best.tokens_per_s),
        "layout_cpu_s": round(layout_cpu_s, 1),
        "policy_cpu_s": round(cpu_s - layout_cpu_s, 1),
        "cpu_s": round(cpu_s, 1),
        "of_best": of_best(setting, layout, is_pipemax=policy.startswith(ChosenPolicy.PIPEMAX)),
        "layout_reason": choice.reason,
        "policy_reason": reason,
        "of_layout": str(ChosenPolicy.VLLM if best is None else best.policy),
    }


def of_best(setting: Setting, layout: Layout, *, is_pipemax: bool) -> float | None:
    """Return the rate of a choice over that of the best known cell; ``None`` where its cell is not done."""
    cells = drawing(setting, 0, Store(FILE)).done
    rates = {(cell.system, cell.layout): steady_rate(figures) for cell, figures in cells.items()}
    rates = {key: rate for key, rate in rates.items() if key[0] is not System.BALANCED}
    chosen = rates.get((System.PIPEMAX if is_pipemax else System.STOCK, layout))
    return None if chosen is None else round(chosen / max(rates.values()), 3)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lab.bench.choice_seconds",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", help="settings whose names have one of the words"
    )
    parser.add_argument("--rows", type=int, default=TABLE_ROWS, help="rows of the table")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS))
    entries: list[dict[str, Any]] = []
    for setting in dict.fromkeys(SETTINGS):
        if options.only and not any(word in setting.name for word in options.only):
            continue
        try:
            entry = run_setting(setting, options.rows)
        except ValueError as error:
            print(f"| {setting.name.replace('--', ', ')} | {str(error)[:60]} |", flush=True)
            continue
        entries.append(entry)
        print("| " + " | ".join(str(entry[name]) for name in COLUMNS) + " |", flush=True)
        if options.json:
            options.json.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
