"""``pipemax plan-capacity``: a table's hours and cost on a node, with PipeMax and with stock vLLM."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipemax.cli.common import (
    FILE_COLUMNS,
    Changes,
    JsonFile,
    KvDtype,
    Model,
    Node,
    Seed,
    changed_node,
    one_line_errors,
    write_json,
)
from pipemax.domain.specs import KvCacheDtype

if TYPE_CHECKING:
    from rich.table import Table

    from pipemax.domain.specs import NodeSpec
    from pipemax.domain.workload import WorkloadSpec
    from pipemax.policy.compare import CapacityPlan

_GB = 1e9

Rows = Annotated[int, typer.Option(min=1, help="Rows of the table.")]
Price = Annotated[float, typer.Option(min=0.0, help="Of the node, per hour, in any currency.")]
Profile = Annotated[
    str,
    typer.Option(
        "--workload",
        help="Length profile to begin with: sharegpt, longbench, templated, or a .yaml file of your own.",
    ),
]
HostMemory = Annotated[
    list[float] | None,
    typer.Option("--host-memory", metavar="GB", help="A size of host memory to compare. Repeatable."),
]
Divisions = Annotated[
    list[int] | None,
    typer.Option(
        "--gpus-per-engine",
        min=1,
        help="A way to divide the node: GPUs of one engine (n). Repeatable; the whole node and its halves unless said.",
    ),
]
Sample = Annotated[
    int, typer.Option(min=1, help="Rows simulated. More for host memory that holds all of the sample's KV.")
]


def plan_capacity(
    rows: Rows,
    price: Price,
    node: Node = "rtx5090x8",
    model: Model = "llama2-70b",
    workload: Profile = "sharegpt",
    prompt_mean: Annotated[float | None, typer.Option(help="Mean prompt, tokens.")] = None,
    prompt_median: Annotated[float | None, typer.Option(help="Median prompt, tokens.")] = None,
    output_mean: Annotated[float | None, typer.Option(help="Mean output, tokens.")] = None,
    output_median: Annotated[float | None, typer.Option(help="Median output, tokens.")] = None,
    host_memory: HostMemory = None,
    gpus_per_engine: Divisions = None,
    sample: Sample = 1500,
    seed: Seed = 0,
    kv_dtype: KvDtype = KvCacheDtype.AUTO,
    changes: Changes = None,
    json_file: JsonFile = None,
) -> None:
    """Estimate a table's hours and cost on one node, and whether PipeMax beats stock vLLM there.

    Simulates a sample of rows with the table's length statistics under each way to run it, which takes seconds, and
    applies the sample's steady rate to the whole table. An engine's `policy: auto` compares the same simulated
    systems, but with its own measured step times instead of a profile's.

    Example: pipemax plan-capacity --rows 10000000 --price 20 --prompt-mean 500 --prompt-median 400
    """
    from rich.console import Console

    from pipemax.policy.compare import plan_capacity as plan_options
    from pipemax.presets import load_model

    with one_line_errors():
        statistics = length_statistics(
            workload,
            {"mean": prompt_mean, "median": prompt_median},
            {"mean": output_mean, "median": output_median},
        )
        spec = changed_node(node, changes or [])
        plan = plan_options(
            spec,
            load_model(model).with_kv_dtype(kv_dtype),
            statistics,
            rows=rows,
            price_per_hour=price,
            host_memory_bytes=[size * _GB for size in host_memory or ()],
            gpus_per_engine=gpus_per_engine or (),
            sample_requests=sample,
            seed=seed,
        )
        console = Console(width=None if Console().is_terminal else FILE_COLUMNS)
        console.print(_table(plan, spec, kv_dtype))
        console.print(f"policy: {plan.choice.chosen}. {plan.choice.reason}.", highlight=False)
        for reason in plan.not_possible:
            console.print(f"left out: {reason}", highlight=False)
        if json_file:
            write_json(json_file, {"kv_dtype": kv_dtype.value, **_json_object(plan)})


def length_statistics(
    profile: str, prompt: dict[str, float | None], output: dict[str, float | None]
) -> "WorkloadSpec":
    """Return a profile's length statistics, with the means and medians that the caller gave in their place."""
    from dataclasses import replace

    from pipemax.presets import load_workload

    spec = load_workload(profile)

    def known(side: dict[str, float | None]) -> dict[str, Any]:
        return {name: value for name, value in side.items() if value is not None}

    return replace(
        spec, prompt=replace(spec.prompt, **known(prompt)), output=replace(spec.output, **known(output))
    )


def _table(plan: "CapacityPlan", node: "NodeSpec", kv_dtype: KvCacheDtype) -> "Table":
    from rich.table import Table

    kv = "" if kv_dtype is KvCacheDtype.AUTO else f" with {kv_dtype} KV"
    sheet = Table(title=f"{plan.rows:,} rows on {node.name}{kv}, fastest first")
    sheet.add_column("system")
    for heading in ("GPUs an engine (n)", "host memory, GB", "tok/s", "decode batch", "hours", "cost"):
        sheet.add_column(heading, justify="right")
    for option in plan.options:
        sheet.add_row(
            option.system,
            str(option.gpus_per_engine),
            f"{option.host_memory_bytes / _GB:,.0f}" if option.system == "pipemax" else "",
            f"{option.tokens_per_s:,.0f}",
            f"{option.mean_decode_batch:.0f}",
            f"{option.hours:,.1f}",
            f"{option.cost:,.0f}",
        )
    return sheet


def _json_object(plan: "CapacityPlan") -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "rows": plan.rows,
        "policy": plan.choice.chosen.value,
        "reason": plan.choice.reason,
        "speedup": round(plan.choice.speedup, 3),
        "best": asdict(plan.best),
        "options": [asdict(option) for option in plan.options],
        "not_possible": plan.not_possible,
    }
