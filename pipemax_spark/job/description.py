"""Describe a run before its first row: for MLflow, for its page there, and for the run after it."""

import sys
from dataclasses import asdict
from datetime import datetime
from typing import Any

from pipemax.wire import PACKAGE_VERSION
from pipemax_spark.job.job import Job
from pipemax_spark.report.past_runs import started_at
from pipemax_spark.report.report_page import RunFacts
from pipemax_spark.report.tracking import InputTable
from pipemax_spark.rows.written_rows import WrittenRows

_REPORTED_CONF = (
    *("spark.master", "spark.executor.instances", "spark.executor.cores", "spark.executor.memory"),
    *("spark.task.cpus", "spark.executor.resource.gpu.amount", "spark.task.resource.gpu.amount"),
    *("spark.dynamicAllocation.enabled", "spark.speculation"),
)


def run_params(job: Job) -> dict[str, Any]:
    """Return the run's parameters for MLflow."""
    conf = {name: job.spark.conf.get(name, None) for name in _REPORTED_CONF}
    options, checked = job.options, job.checked
    return {
        "run": job.run_id,
        "spec_hash": checked.spec.hash,
        "input": checked.source.name,
        "input_version": checked.source.version,
        **({} if options.where is None else {"where": options.where}),
        "output": job.table.name,
        "model_fingerprint": checked.reply.model_fingerprint,
        **{f"engine.{name}": value for name, value in checked.reply.engine.items()},
        **{f"generation.{name}": value for name, value in asdict(options.generation).items()},
        **{f"ask.{question.name}": question.template for question in options.ask},
        **{name: value for name, value in conf.items() if value is not None},
        "version.spark": job.spark.version,
        "version.python": sys.version.split()[0],
        **{f"version.{name}": version for name, version in checked.reply.versions.items()},
    }


def input_table(job: Job) -> InputTable:
    """Return the input as MLflow's dataset. Files and views have no version: the run's id stands for one."""
    source = job.checked.source
    if source.version is None:
        return InputTable(name=source.name, version=job.run_id, kind="spark")
    kind = "delta_table" if source.tells_appends else "spark"
    return InputTable(name=source.name, version=str(source.version), kind=kind)


def run_description(job: Job) -> str:
    """Return what the run does, in five lines of Markdown, for the top of its page in MLflow."""
    source, engine, generation = job.checked.source, job.checked.reply.engine, job.options.generation
    prompts = job.options.source
    version = "" if source.version is None else f", version {source.version}"
    prompt = prompts.template or prompts.prompt_column or prompts.messages_column or ""
    shape = "free text" if generation.response_format is None else "answers that follow a schema"
    generates = f"{shape}, up to {generation.max_tokens} tokens, temperature {generation.temperature:g}"
    stages = engine.get("pipeline_parallel_size") or "as many stages as fit"
    return "\n".join(
        [
            f"- **Reads** `{source.name}`{version}: {job.checked.rows_in:,} rows",
            f"- **Writes** `{job.table.name}`",
            f"- **Model** `{engine.get('model')}`, policy `{engine.get('policy')}`, stages: {stages}",
            f"- **Prompt** `{' '.join(prompt.split())[:200]}`",
            f"- **Task** {generation.task}" if generation.is_pooling else f"- **Generates** {generates}",
        ]
    )


def run_facts(job: Job, *, ended: datetime, stopped_by: str | None) -> RunFacts:
    """Return what the run's page says of it at its head. ``ended`` has a time zone."""
    source, options, reply = job.checked.source, job.options, job.checked.reply
    prompts = options.source
    version = "" if source.version is None else f", version {source.version}"
    where = "" if options.where is None else f", where {options.where}"
    prompt = prompts.template or f"column {prompts.prompt_column or prompts.messages_column}"
    asked = "".join(f"\n{question.name}: {question.template}" for question in options.ask)
    versions = {"pipemax-spark": PACKAGE_VERSION, "Spark": job.spark.version, **reply.versions}
    return RunFacts(
        run_id=job.run_id,
        input=f"{source.name}{version}{where}",
        prompt=f"{prompt}{asked}",
        system=options.generation.system,
        model=str(reply.engine.get("model") or reply.model),
        versions=", ".join(f"{name} {number}" for name, number in versions.items()),
        started=started_at(job.run_id),
        ended=ended,
        stopped_by=stopped_by,
    )


def run_manifest(job: Job, rows: WrittenRows | None) -> dict[str, Any]:
    """Return what the next run must know about this one if it dies; ``rows`` are those that it could reuse."""
    source, spec = job.checked.source, job.checked.spec
    return {
        "source": {"name": source.name, "version": source.version},
        "spec_hash": spec.hash,
        "spec": dict(spec.values),
        "rows": None if rows is None else rows.for_manifest(),
    }
