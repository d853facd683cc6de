"""``pipemax rehearse``: run a user's own job on a node that they do not have yet, with vLLM's real scheduler."""

import os
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipemax.cli.capacity import length_statistics
from pipemax.cli.common import (
    NODE_PANEL,
    OUTPUT_PANEL,
    ROWS_PANEL,
    Changes,
    JsonFile,
    Model,
    Node,
    Seed,
    changed_node,
    one_line_errors,
    require_generation,
    write_json,
)

if TYPE_CHECKING:
    from pipemax.config import EngineConfig
    from pipemax.domain.workload import WorkloadSpec
    from pipemax.policy.table_sample import PromptSource
    from pipemax.sim.workloads import Workload

_MOST_COUNTED = 4000
"""Rows whose prompts are counted, before it is known how many to rehearse."""
_NO_LIMIT = 1 << 24
_PICTURES = (".svg", ".png", ".pdf")

_JOB_PANEL = "Job"

Engine = Annotated[
    Path,
    typer.Option(
        exists=True, dir_okay=False, rich_help_panel=_JOB_PANEL, help="The job's engine config, a YAML file."
    ),
]
Input = Annotated[
    Path | None,
    typer.Option(
        "--input",
        rich_help_panel=_JOB_PANEL,
        help="The job's table: a Parquet file, or a directory with a Parquet or Delta table.",
    ),
]
PromptColumn = Annotated[
    str | None, typer.Option(rich_help_panel=_JOB_PANEL, help="Column of --input with the prompt.")
]
Template = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=_JOB_PANEL,
        help="Prompt with {column} placeholders, as in the job. Write \\n for a line break.",
    ),
]
System = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=_JOB_PANEL, help="System message to put before every prompt, as in the job."
    ),
]
PromptTokens = Annotated[
    str | None,
    typer.Option(
        "--prompt-tokens-column",
        rich_help_panel=ROWS_PANEL,
        help="Column of --input with prompt lengths in tokens, instead of prompts.",
    ),
]
OutputTokens = Annotated[
    str | None,
    typer.Option(
        "--output-tokens-column",
        rich_help_panel=ROWS_PANEL,
        help="Column of --input with output lengths in tokens, if they are known.",
    ),
]
Profile = Annotated[
    str,
    typer.Option(
        "--workload",
        rich_help_panel=ROWS_PANEL,
        help="Length profile for lengths that --input does not give, as in plan-capacity.",
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(min=1, rich_help_panel=_JOB_PANEL, help="The job's maximum output tokens per row."),
]
TableRows = Annotated[
    int | None,
    typer.Option(
        "--rows",
        min=1,
        rich_help_panel=ROWS_PANEL,
        help="Rows in the table; default: as many as --input has.",
    ),
]
Sample = Annotated[
    int | None,
    typer.Option(
        min=20,
        rich_help_panel=ROWS_PANEL,
        help="Rows to rehearse; default: enough to fill the GPUs' KV three times, at most 2,000.",
    ),
]
Price = Annotated[
    float | None,
    typer.Option(min=0.0, rich_help_panel=NODE_PANEL, help="Price of the node per hour, in any currency."),
]
HostFactor = Annotated[
    float,
    typer.Option(
        min=0.0,
        rich_help_panel=NODE_PANEL,
        help="Scheduler CPU time on the node divided by that on this machine; 0 leaves it out.",
    ),
]
Picture = Annotated[
    Path | None,
    typer.Option(
        rich_help_panel=OUTPUT_PANEL, help="Draw GPU and host KV over time in this file (.svg, .png or .pdf)."
    ),
]


def rehearse(
    engine: Engine,
    node: Node = "rtx5090x8",
    model: Model = "llama2-70b",
    input_path: Input = None,
    prompt_column: PromptColumn = None,
    template: Template = None,
    system: System = None,
    prompt_tokens_column: PromptTokens = None,
    output_tokens_column: OutputTokens = None,
    workload: Profile = "sharegpt",
    output_mean: Annotated[
        float | None, typer.Option(rich_help_panel=ROWS_PANEL, help="Mean output length in tokens.")
    ] = None,
    output_median: Annotated[
        float | None, typer.Option(rich_help_panel=ROWS_PANEL, help="Median output length in tokens.")
    ] = None,
    max_tokens: MaxTokens = None,
    rows: TableRows = None,
    sample: Sample = None,
    price: Price = None,
    seed: Seed = 0,
    changes: Changes = None,
    host_factor: HostFactor = 1.0,
    picture: Picture = None,
    json_file: JsonFile = None,
) -> None:
    """Rehearse a job on a node that you do not have: tokens/s, phases, KV use, hours and cost.

    Runs vLLM's real engine core and scheduler, or PipeMax's, over simulated GPUs that only take time, with a sample of
    the table's lengths. No model is loaded and nothing is computed. If the engine config leaves policy, batching or
    max_num_batched_tokens open, rehearses the best of each by simulation. Prints the lines of the engine config to use
    at the end.

    Example: pipemax rehearse --engine engine.yaml --input reviews.parquet --prompt-column text --price 20
    """
    with one_line_errors():
        from pipemax.cli.rehearsal_report import RehearsalReport
        from pipemax.config import EngineConfig
        from pipemax.presets import load_model
        from pipemax.rehearsal.candidates import engine_part, rows_that_fill, unused_fields

        _require_vllm()
        _check_files(json_file, picture)
        config = EngineConfig.load(engine, default_model=model)
        require_generation(config)
        spec = changed_node(node, changes or [])
        model_spec = load_model(model).with_kv_dtype(config.kv_cache_dtype)
        part = engine_part(config, spec, model_spec)
        statistics = _limited(
            length_statistics(workload, {}, {"mean": output_mean, "median": output_median}), max_tokens
        )
        if input_path is None:
            table = _profile_rows(config, statistics, sample or _MOST_COUNTED, seed)
        else:
            source = _source(prompt_column, template, prompt_tokens_column)
            table = _table_rows(
                config, statistics, input_path, source, system, output_tokens_column, sample or 0, seed
            )
        lengths = table.workload.first(sample or rows_that_fill(part, model_spec, table.workload))
        say = partial(typer.echo, err=True)
        say(f"{len(lengths):,} rows of {table.name}; no model is loaded and nothing is computed")
        from pipemax.vllm_ext.rehearsal.job import rehearse_job

        ran, not_possible = rehearse_job(
            config,
            part,
            model_spec,
            lengths,
            max_model_len=table.max_model_len,
            host_factor=host_factor,
            tell=say,
        )
        report = RehearsalReport(
            node=spec.name,
            model=model_spec.name,
            part=part,
            table=table.name,
            table_rows=rows or table.num_rows,
            workload=lengths,
            price_per_hour=price,
            runs=ran,
            not_possible=not_possible,
            unused=unused_fields(config),
            left_out=table.left_out,
        )
        report.show()
        if json_file:
            write_json(json_file, report.json_object())
        if picture:
            report.draw(picture)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """The rows to rehearse, and the table that they represent."""

    name: str
    workload: "Workload"
    num_rows: int
    """Rows of the table."""
    max_model_len: int
    left_out: float = 0.0
    """Share of the sampled rows that would be error rows in a job: no prompt, or one that is too long."""


def _require_vllm() -> None:
    if find_spec("vllm") is None:
        raise ValueError("a rehearsal runs vLLM's own scheduler: install pipemax-spark[cpu] or [gpu]")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def _check_files(json_file: Path | None, picture: Path | None) -> None:
    """Raise ``ValueError`` for a file that could not be written, before minutes of work."""
    for path in (json_file, picture):
        if path is not None and not path.resolve().parent.is_dir():
            raise ValueError(f"there is no directory {path.resolve().parent}")
    if picture is None:
        return
    if find_spec("matplotlib") is None:
        raise ValueError("--picture needs matplotlib: pip install matplotlib")
    if picture.suffix not in _PICTURES:
        raise ValueError(f"--picture {picture}: the name must end in {', '.join(_PICTURES)}")


def _limited(spec: "WorkloadSpec", max_tokens: int | None) -> "WorkloadSpec":
    """Return the statistics with outputs of at most ``max_tokens``."""
    if max_tokens is None or max_tokens >= spec.output.most:
        return spec
    if max_tokens < max(spec.output.mean, spec.output.median):
        raise ValueError(
            f"--max-tokens {max_tokens} is below the mean output of {spec.output.mean:g} tokens or the median of "
            f"{spec.output.median:g}: say with --output-mean and --output-median how many you expect"
        )
    return replace(spec, output=replace(spec.output, most=max_tokens))


def _profile_rows(config: "EngineConfig", statistics: "WorkloadSpec", num_rows: int, seed: int) -> _Rows:
    """Draw prompts and outputs from a profile, as plan-capacity does."""
    import numpy as np

    from pipemax.sim.workloads import draw_workload

    max_model_len = config.max_model_len or statistics.context_tokens
    spec = replace(statistics, context_tokens=max_model_len)
    drawn = draw_workload(spec, num_rows, np.random.default_rng(seed))
    return _Rows(name=f"profile {spec.name}", workload=drawn, num_rows=num_rows, max_model_len=max_model_len)


def _source(column: str | None, template: str | None, tokens_column: str | None) -> "PromptSource":
    from pipemax.policy.table_sample import PromptSource

    text = None if template is None else template.replace("\\n", "\n")
    return PromptSource(column=column, template=text, tokens_column=tokens_column)


def _table_rows(
    config: "EngineConfig",
    statistics: "WorkloadSpec",
    path: Path,
    source: "PromptSource",
    system: str | None,
    output_column: str | None,
    num_rows: int,
    seed: int,
) -> _Rows:
    """Count the prompts of rows drawn from the table; read their outputs' lengths or draw them."""
    from pipemax.checkpoint.prompt_encoder import PromptEncoder
    from pipemax.checkpoint.tokenizer import load_tokenizer
    from pipemax.policy.table_sample import (
        as_workload,
        count_prompts,
        drawn_outputs,
        read_outputs,
        sample_rows,
    )

    columns = [*source.columns, *([output_column] if output_column else [])]
    sampled = sample_rows(path, columns, max(num_rows, _MOST_COUNTED), seed=seed)
    encoder = None
    limit = config.max_model_len or _NO_LIMIT
    if source.tokens_column is None:
        encoder = PromptEncoder(load_tokenizer(config), chat=config.chat, max_model_len=limit)
    prompts = count_prompts(sampled.columns, source, encoder, system=system, max_model_len=limit)
    if output_column:
        outputs = read_outputs(prompts.rows, output_column)
        max_model_len = config.max_model_len or int((prompts.tokens + outputs).max()) + 1
    else:
        max_model_len = config.max_model_len or int(prompts.tokens.max()) + statistics.output.most
        outputs = drawn_outputs(prompts.tokens, statistics.output, max_model_len=max_model_len, seed=seed)
    return _Rows(
        name=str(path),
        workload=as_workload(path.stem, prompts, outputs, max_model_len),
        num_rows=sampled.num_rows_of_table,
        max_model_len=max_model_len,
        left_out=1 - len(prompts.tokens) / sampled.columns.num_rows,
    )
