"""Decide which rows of the output a run's rows replace, and begin to replace those of other specs.

With ``--new-spec replace`` a row of another spec leaves in the commit that brings its row's new answer (``outcomes``),
also where that is an error. Before the first such commit, the run notes among the table's properties that its spec
replaces the others: a later run of this spec then goes on replacing without being told, and a run of another one is
refused as a new spec, though the table had known it. Rows of other specs whose ids have a row of this spec already, as
after ``--new-spec stack``, leave in one commit before.
"""

from typing import TYPE_CHECKING

from pipemax_spark.errors import CommitRefusedError, NewSpec, TakenOverError
from pipemax_spark.job.job import Job, JobCall
from pipemax_spark.job.outcomes import OldRows, ReplacingOutcomes
from pipemax_spark.rows.annotated import ANNOTATION
from pipemax_spark.rows.remaining import Remaining
from pipemax_spark.spark.sql import quoted
from pipemax_spark.storage.fence import Claim
from pipemax_spark.storage.output_table import OutputTable
from pipemax_spark.storage.spec_properties import is_replacing, replaced_by

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def old_rows(job: Job, *, changed: bool = False) -> OldRows:
    """Return which rows of the output this run's rows replace, among them those of ``changed`` rows.

    Call it once the output is claimed.
    """
    return OldRows(
        spec_hash=job.checked.spec.hash,
        errors=job.options.retry_errors,
        good=job.options.redo_changed or changed,
        other_specs=replaces_specs(job.table, job.options.new_spec, job.checked.spec.hash),
    )


def replaces_specs(table: OutputTable, new_spec: NewSpec | None, spec_hash: str) -> bool:
    """Tell whether rows of this spec are to replace those of other specs, and the table, which exists, holds any."""
    is_told = is_replacing(table.properties(), spec_hash) if new_spec is None else new_spec is NewSpec.REPLACE
    return is_told and not _of_others(table, spec_hash).isEmpty()


def begin_replacing(job: Job, claim: Claim, old: OldRows, *, number: int) -> None:
    """Note which specs are replaced, and remove their rows that have a row of this spec next to them.

    ``number`` is an unused chunk number.
    """
    if properties := replaced_by(job.table.properties(), job.checked.spec.hash):
        job.table.set_properties(properties)
    if (rows := _superseded(job)) is None:
        return
    transaction = claim.removal(number)
    try:
        ReplacingOutcomes.of(job, old).drop(rows, transaction)
    except CommitRefusedError as error:
        raise TakenOverError(claim.taken_over()) from error
    claim.landed(transaction, expected_rows=0)
    job.terminal.say("Replace", "rows of other specs whose ids had a row of this one were removed")


def has_superseded(job: Job) -> bool:
    """Tell whether a run that finds nothing left to annotate has old rows to remove."""
    return (
        job.remaining.is_annotated()
        and replaces_specs(job.table, job.options.new_spec, job.checked.spec.hash)
        and _superseded(job) is not None
    )


def num_error_rows(job: Job) -> int:
    """Count the error rows of the spec that the output holds."""
    errors = OldRows(spec_hash=job.checked.spec.hash, errors=True)
    rows: int = job.table.read().where(errors.condition(ANNOTATION)).count()
    return rows


def say_replaced(
    call: JobCall, remaining: Remaining, rows: "DataFrame", *, finds_changed: bool = False
) -> None:
    """Print how many rows of the output the rows that are left may replace, as changed ones or by a new spec."""
    if call.options.redo_changed or finds_changed:
        num_rows = remaining.num_changed(rows)
        call.terminal.say(
            "Redo",
            f"{num_rows:,} rows have changed since they were annotated; each old row stays until its new one is "
            "committed",
        )
    spec_hash = remaining.checked.spec.hash
    if replaces_specs(call.table, call.options.new_spec, spec_hash):
        num_rows = _of_others(call.table, spec_hash).count()
        call.terminal.say(
            "Replace", f"{num_rows:,} rows are of other specs; each stays until its new one is committed"
        )


def _of_others(table: OutputTable, spec_hash: str, version: int | None = None) -> "DataFrame":
    return table.read(version=version).where(f"{ANNOTATION}.spec_hash <> '{spec_hash}'")


def _superseded(job: Job) -> "DataFrame | None":
    """Return the ids of rows of other specs that have a row of this one too; None if there are none.

    Without ids, None: equal rows may be many, and then nothing tells which of them are superseded.
    """
    ids = [*map(quoted, job.checked.id_columns)]
    if not ids:
        return None
    version = job.table.version()
    held = job.remaining.held(version).select(*ids)
    others = _of_others(job.table, job.checked.spec.hash, version).select(*ids)
    rows = others.distinct().join(held, on=list(job.checked.id_columns), how="left_semi")
    return None if rows.isEmpty() else rows
