"""Which options a job has over Spark Connect, from a client without a JVM; the others are refused by their names.

The right to commit is kept there as in a classic session (``fence``): it is made of appends that Delta orders, and of
the table's history. What is missing is what only the driver's JVM or a reachable driver can do.
"""

from collections.abc import Iterator
from dataclasses import MISSING, fields, replace

from pipemax_spark.errors import JobError
from pipemax_spark.options import JobOptions
from pipemax_spark.storage.hadoop import is_remote

_OF_REPORTS = "counts what engines report, and no report reaches a client"
_OF_PLANS = "needs the query's plan, which a client does not see"
_OF_STREAMS = "follows its input by a position in the driver's files"
_OF_MERGES = "replaces rows by merges, whose fence is untested there"
_UNTESTED = "is untested there"
_REFUSED = {
    "incremental": _OF_STREAMS,
    "cascade": "keeps its certificate by the driver's files",
    "reuse": _UNTESTED,
    "canary": _UNTESTED,
    "dry_run": _UNTESTED,
    "order_by": _OF_PLANS,
    "input_format": "reads files in the driver",
    "batch_output": "writes files in the driver",
    "retry_errors": _OF_MERGES,
    "redo_changed": _OF_MERGES,
    "new_spec": _OF_MERGES,
    "max_tokens_total": _OF_REPORTS,
    "metrics_port": _OF_REPORTS,
    "collector_port": "is for engines' reports, and none reaches a client",
}
"""Option → why a job over Spark Connect does not have it."""


def connect_options(options: JobOptions) -> JobOptions:
    """Return the options of a job over Spark Connect. Raise ``JobError`` for one that it does not have."""
    for name, reason in _faults(options):
        raise JobError(
            f"over Spark Connect the job has no {name} yet: it {reason}. Leave it out, or run the job in a classic "
            "session"
        )
    return replace(options, over_connect=True)


def _faults(options: JobOptions) -> Iterator[tuple[str, str]]:
    for field in fields(options):
        is_given = field.default is MISSING or getattr(options, field.name) != field.default
        if field.name in _REFUSED and is_given:
            yield field.name, _REFUSED[field.name]
    if options.max_cost is not None and options.prices.has_tokens:
        yield "max_cost with prices of tokens", _OF_REPORTS
    if options.summary is not None and is_remote(options.summary):
        yield "summary on remote storage", "writes that file on this machine"
