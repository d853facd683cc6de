"""``pipemax tune``: what lossy weights, lossy KV or speculation would gain on a table's rows, and which answers change.

Each setting needs an engine of its own, so the rows are answered by one engine after the other: as configured, with
each setting, and as configured once more. The last one shows how far rates and answers differ without any change.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipemax_spark.errors import JobError, failure_text, is_interrupt
from pipemax_spark.job.settings import job_settings
from pipemax_spark.job.trial import Trial, TrialOptions
from pipemax_spark.report.intervals import share_interval
from pipemax_spark.report.side_by_side import Answered
from pipemax_spark.report.terminal import Terminal

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_LOSSY = (("kv_cache_dtype", "fp8"), ("quantization", "fp8"))
_SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
_REASON_CHARS = 160


@dataclass(frozen=True, slots=True)
class Variant:
    """A line of an engine config that may make the engine faster and may change answers."""

    line: str
    engine: Mapping[str, Any]
    """The whole config, with the line."""


def run_tuning(spark: "SparkSession", options: TrialOptions, terminal: Terminal) -> None:
    """Answer the rows by each engine, and print its rate and how many answers stayed as they were.

    Raise ``JobError`` for what the user can fix in the job's own options. A setting under which no engine starts, for
    the model or the machine does not have it, is reported with the reason.
    """
    engine = options.job.engine
    if "endpoint" in engine:
        raise JobError(
            "tune tries settings of an engine on your machines, and the engine config names an endpoint, whose server "
            "decides them; pipemax doctor --engine says what that can"
        )
    with job_settings(spark):
        trial = Trial.of_first_rows(spark, options, terminal)
        trial.render(options.job.source)  # a wrong prompt is said before an engine starts
        terminal.say("Answers", "as the engine is configured")
        base = _answered(trial, options)
        results: list[tuple[str, Answered | str]] = []
        for variant in variants(engine):
            terminal.say("Answers", f"with {variant.line}")
            results.append((variant.line, _tried(trial.with_engine(variant.engine), options)))
        terminal.say("Answers", "once more as the engine is configured")
        again = _answered(trial.with_engine(engine), options)
    terminal.console.print()
    for line in table(base, again, results):
        terminal.console.print(line, markup=False, highlight=False, soft_wrap=True)


def variants(engine: Mapping[str, Any]) -> Iterator[Variant]:
    """Yield the engine's config with each setting that it does not have: FP8 KV, FP8 weights, n-gram speculation."""
    import yaml

    of_vllm = engine.get("vllm") or {}
    for name, value in _LOSSY:
        if name not in engine and name not in of_vllm:
            yield Variant(f"{name}: {value}", {**engine, name: value})
    if "speculative_config" not in of_vllm:
        added = {"speculative_config": _SPECULATION}
        line = f"vllm: {yaml.safe_dump(added, default_flow_style=True, sort_keys=False, width=1_000).strip()}"
        yield Variant(line, {**engine, "vllm": {**of_vllm, **added}})


def table(base: Answered, again: Answered, results: Sequence[tuple[str, Answered | str]]) -> list[str]:
    """Return the lines to print: rates, times the first rate, and equal answers with interval."""
    lines = [
        ("line of the engine config", f"{'rows/s':>9}  {'times':>5}  same answers"),
        ("(none)", f"{base.rows_per_s:>9.1f}"),
        *((line, _row(base, result)) for line, result in [*results, ("(none, again)", again)]),
    ]
    width = max(len(name) for name, _ in lines)
    spread = max(base.rows_per_s, again.rows_per_s) / min(base.rows_per_s, again.rows_per_s)
    note = (
        f"Without a change the rate differed by a factor of {spread:.2f}: believe no smaller gain. Rates include the "
        "start and the end of these rows, where an engine is not full; more --rows come closer to a table's."
    )
    return [*(f"{name:<{width}}  {text}".rstrip() for name, text in lines), note]


def _row(base: Answered, result: Answered | str) -> str:
    if isinstance(result, str):
        return f"not here: {result}"
    equal, total = base.equal_to(result)
    rate = f"{result.rows_per_s:>9.1f}  {result.rows_per_s / base.rows_per_s:>5.2f}  "
    if not total:
        return f"{rate}no row without an error"
    low, high = share_interval(equal, total)
    return f"{rate}{equal / total:.1%} ({low:.1%} to {high:.1%}) of {total:,}"


def _answered(trial: Trial, options: TrialOptions) -> Answered:
    with trial:
        rows, _ = trial.answer(options.job.source, trial.render(options.job.source))
    return Answered(rows)


def _tried(trial: Trial, options: TrialOptions) -> Answered | str:
    try:
        return _answered(trial, options)
    except JobError as error:
        return _shortened(str(error))
    except Exception as error:  # what an engine says that does not start
        if is_interrupt(error):
            raise
        log.warning("an engine did not start", exc_info=True)
        return _shortened(failure_text(error))


def _shortened(reason: str) -> str:
    """Return the first words of why an engine did not start, for one line of the table; the log has all of it."""
    first, _, _ = (
        reason.partition("\n")[0].removeprefix("engine_start_failed: ").partition(" (not tried again")
    )
    return first if len(first) <= _REASON_CHARS else f"{first[:_REASON_CHARS]} …"
