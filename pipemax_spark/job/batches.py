"""The batches in which a job's rows come, and which of their rows count.

An incremental job follows what becomes of its input's rows if the input tells it and the output's rows can be replaced;
else it follows appends only.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from pipemax_spark.errors import JobError, OnDelete
from pipemax_spark.job.deleted import DELETED_AT
from pipemax_spark.job.fit import check_values_kept
from pipemax_spark.job.job import Job, JobCall
from pipemax_spark.options import JobOptions
from pipemax_spark.request.prompts import find_field
from pipemax_spark.rows.annotated import output_schema
from pipemax_spark.rows.delta_changes import FEED, DeltaChanges, has_feed
from pipemax_spark.rows.following import ChangingInput, FollowedChanges
from pipemax_spark.rows.iceberg_changes import IcebergChanges
from pipemax_spark.rows.id_columns import check_ids
from pipemax_spark.rows.incremental import Batch, MicroBatches
from pipemax_spark.rows.position import Nights, OldPositionFile, Positions
from pipemax_spark.rows.remaining import rows_where
from pipemax_spark.spark.sql import quoted
from pipemax_spark.storage.hadoop import HadoopFiles
from pipemax_spark.storage.iceberg import IcebergTable
from pipemax_spark.storage.iceberg_catalog import IcebergCatalog
from pipemax_spark.storage.sources import Source
from pipemax_spark.storage.spec_properties import spec_since
from pipemax_spark.storage.tables import DeltaTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType


def batches_of(job: Job) -> AbstractContextManager[Iterable[Batch]]:
    """Return the batches in which the job's rows come, as a context whose exit ends the stream, if there is one."""
    options, source = job.options, job.checked.source
    if not options.incremental:
        whole = None if options.certified is None else options.certified.whole
        return nullcontext([Batch(rows=source.rows, whole=whole)])
    if source.version is None:  # an Iceberg table without snapshots, and so without rows
        return nullcontext([Batch(rows=source.rows, compares_all=True, counts_all=True)])
    need = _needed_to_follow(job, source, job.checked.schema)
    positions = _positions(job)
    if source.is_iceberg or need is None:
        return FollowedChanges(
            _changing_input(job, source, source.version, follows=need is None),
            job.table,
            positions,
            rows=source.rows,
            id_columns=job.checked.id_columns,
            directory=f"{job.work.path}/changes",
            need=need,
            rescans=options.rescan,
            skips_changes=options.skip_changes,
            tells_gone=options.on_delete is not OnDelete.KEEP,
            say=job.terminal.warn,
        )
    remedy = f"To have changed rows annotated again needs {need}. "
    return MicroBatches(
        job.spark, options, job.checked, job.work, positions, remedy=remedy, say=job.terminal.warn
    )


def _changing_input(job: Job, source: Source, version: int, *, follows: bool) -> ChangingInput:
    if not source.is_iceberg:
        return DeltaChanges(DeltaTable(job.spark, source.name), version)
    return IcebergChanges(
        table=IcebergTable(job.spark, source.name),
        catalog=IcebergCatalog.of(job.spark, source.name),
        version=version,
        id_columns=job.checked.id_columns if follows else (),
        options=job.options.input_option,
    )


def _positions(job: Job) -> Positions:
    options, checked = job.options, job.checked
    assert checked.source.table_id is not None, checked.source
    nights = Nights(
        input_id=checked.source.table_id,
        spec_hash=checked.spec.hash,
        where=options.where,
        spec_since=spec_since(job.table.properties(), checked.spec.hash),
    )
    directory = options.checkpoint or job.work.checkpoints_path
    old = OldPositionFile(HadoopFiles(job.spark), directory, nights, warn=job.terminal.warn)
    return Positions(job.table, nights, schema=output_schema(checked.schema, options), old=old)


def check_follows(call: JobCall, source: Source, schema: "StructType") -> None:
    """Raise ``JobError`` if deleted rows are to be marked or removed and the job cannot follow its input's changes."""
    on_delete = call.options.on_delete
    if on_delete is OnDelete.KEEP:
        return
    if (need := _needed_to_follow(call, source, schema)) is not None:
        raise JobError(f"--on-delete {on_delete} follows changes of the input, which needs {need}")
    if on_delete is OnDelete.MARK and find_field(DELETED_AT, schema) is not None:
        raise JobError(
            f"the input has a column {DELETED_AT!r}, which is the name of the mark of --on-delete; rename or drop it"
        )


def _needed_to_follow(call: JobCall, source: Source, schema: "StructType") -> str | None:
    """Return what is missing for the job to follow changes of its input, or None if nothing is."""
    options, output = call.options, call.table
    properties = output.properties() if output.exists() else {}
    kept = source.rows.select(*map(quoted, schema.names))
    needs = {
        "--id-columns": not options.id_columns,
        "a job without --cascade": options.certified is not None,
        "a job without --skip-changes": options.skip_changes,
        f"a job without --input-option {next(iter(options.input_option), '')}": (
            options.input_option and not source.is_iceberg
        ),
        "--select with the columns of the prompt": options.select and not _makes_requests(options, kept),
        "an output without delta.appendOnly": properties.get("delta.appendOnly", "").lower() == "true",
        "an output whose write.delete.mode is copy-on-write": (
            properties.get("write.delete.mode") == "merge-on-read"
        ),
    }
    need = next((name for name, is_missing in needs.items() if is_missing), None)
    if need is not None or source.is_iceberg or has_feed(DeltaTable(call.spark, source.name)):
        return need
    return f"an input with the table property {FEED}=true"


def _makes_requests(options: JobOptions, rows: "DataFrame") -> bool:
    """Tell whether the rows have the columns from which requests are made."""
    try:
        options.request_columns.add(rows)
    except JobError:
        return False
    return True


def chosen_rows(job: Job, batch: Batch) -> Batch:
    """Return the batch with only the rows that count.

    ``--where`` selects them, both of an appended batch and of the whole input. Where all rows of the input are
    compared, they are those that the output lacks: an id may be in the input twice.
    """
    if job.options.incremental:
        where = job.options.where
        whole = None if batch.whole is None else rows_where(batch.whole, where)
        batch = replace(batch, rows=rows_where(batch.rows, where), whole=whole)
    if batch.compares_all:
        done, rows = job.remaining.done_if_any(), batch.rows
        # Without ids, these rows are a part of the input from then on: it says how many equal ones there are.
        whole = None if job.checked.id_columns else rows
        batch = replace(batch, rows=job.remaining.left(batch, done), whole=whole)
    return batch


def counted_rows(job: Job, batch: Batch) -> int:
    """Check and count the batch's rows, unless they were checked with the job."""
    checked, terminal = job.checked, job.terminal
    if batch.part is None and not batch.compares_all:
        return checked.rows_in
    if checked.id_columns:
        # A stream reads rows as they were appended, whatever became of them later.
        then = "" if batch.part is None else ", if the input still has any, and give --rescan once"
        check_ids(batch.rows, checked.id_columns, shows_values=not job.options.no_sample, then=then)
    check_values_kept(job, batch.rows, checked.schema, checked.id_columns)
    rows: int = batch.rows.count()
    if batch.part is None and not batch.counts_all:
        return rows
    if rows:
        check_appended(job, rows)
    condition = "" if job.options.where is None else f" where {job.options.where}"
    if batch.part is None:
        terminal.say(
            "Compared",
            f"all {checked.rows_in:,} rows{condition} of the input: {rows:,} are not in the output yet"
            f"{', or have changed since' if batch.finds_changed else ''}",
        )
    else:
        changed = "appended to the input or changed there" if batch.finds_changed else "appended to the input"
        terminal.say("Stream", f"{batch.part.title}: {rows:,} rows{condition} were {changed}")
    return rows


def check_appended(job: Job, rows: int) -> None:
    """Raise ``RowCountError`` if the job does not allow so many rows to have been appended."""
    job.options.check_row_count(rows, source=f"what was appended to input {job.options.input!r}")
