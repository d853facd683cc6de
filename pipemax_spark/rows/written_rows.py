"""Avoid preparing twice: use the rows that a dead run had recorded, as far as they are not done.

A run finds the rows that are left once, records them in slices, and notes in its manifest which rows these are: those
that the output lacked at the run's claim, of this version of this input and under these options. A later run of the
same job would find the same rows, less those of the slices that were committed since, as long as nothing else has
changed the output's rows. The output's history shows both: the note of each chunk's commit names the chunk's slices.

In every other case, the run searches the output itself for the rows that are left, which is always right.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pipemax_spark.options import JobOptions
from pipemax_spark.rows.checked import Checked
from pipemax_spark.rows.chunks import SliceSpan
from pipemax_spark.rows.workdir import LeftRun
from pipemax_spark.spark.session import is_connect
from pipemax_spark.storage.fence import (
    is_before_chunks_of,
    is_claim,
    is_claim_by,
    is_position,
    note_prefix,
)
from pipemax_spark.storage.output_table import OutputTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_FORMAT = 1
"""The format of the facts, the slices and the keys: a run uses no rows that a run with another format had recorded."""
_KEEPS_ROWS = frozenset({"OPTIMIZE", "SET TBLPROPERTIES", "VACUUM START", "VACUUM END", "replace"})
"""Operations, by any writer, that do not change a table's rows; the last one is Iceberg's."""
_SLICES = re.compile(r"(\d+) \(slices (\d+) to (\d+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenRows:
    """Rows that a run recorded, according to its manifest."""

    rows_hash: str
    """See ``rows_hash``; manifests call it ``which``."""
    epoch: int
    """The run's claim of the output."""
    spans: tuple[SliceSpan, ...]
    slice_rows: tuple[int, ...]
    """Rows of each slice, over all spans."""
    earlier_runs: tuple[str, ...]
    """The dead runs that had recorded some of these slices, or slices before these."""

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> "WrittenRows | None":
        """Return the rows in a dead run's manifest; None if it has none."""
        facts = manifest.get("rows")
        if facts is None:
            return None
        try:
            spans = tuple(SliceSpan(**span) for span in facts["spans"])
            lists = {name: tuple(facts[name]) for name in ("slice_rows", "earlier_runs")}
            return cls(rows_hash=facts["which"], epoch=facts["epoch"], spans=spans, **lists)
        except (KeyError, TypeError):  # of another version of this project
            return None

    def for_manifest(self) -> dict[str, Any]:
        facts = asdict(self)
        return {"which": facts.pop("rows_hash"), **facts}


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The chunks of a run that are committed, and their slices."""

    chunks: frozenset[int]
    slices: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadRun:
    """A dead run, and the rows that it had recorded."""

    run: LeftRun
    rows: WrittenRows

    @classmethod
    def with_rows(cls, rows_hash: str, left_runs: Sequence[LeftRun]) -> "DeadRun | None":
        """Return the dead run that was the last to record the rows with this hash.

        Return None if there is none, or if other dead runs may hold completions of those rows.
        """
        written = [(run, WrittenRows.from_manifest(run.manifest)) for run in left_runs]
        same = [
            cls(run=run, rows=rows)
            for run, rows in written
            if rows is not None and rows.rows_hash == rows_hash
        ]
        if not same:
            return None
        last = max(same, key=lambda dead: dead.rows.epoch)
        spec_hash = last.run.spec_hash
        spooled = {run.run_id for run in left_runs if run.has_spool and run.spec_hash == spec_hash}
        return last if spooled <= {last.run.run_id, *last.rows.earlier_runs} else None

    def committed(self, table: OutputTable) -> Committed | None:
        """Return the run's rows that it has committed.

        None if other rows may have been added to the table or removed.
        """
        commits = table.commits_since(self.rows.epoch - 1)
        # An Iceberg table that was rolled back to before the claim has no commit that says so.
        if not any(is_claim_by(self.run.run_id, commit.note) for commit in commits or ()):
            return None
        chunks, slices = set[int](), set[int]()
        for commit in commits or ():
            is_ours = is_claim(commit.note) or is_before_chunks_of(self.run.run_id, commit.note)
            if is_ours or is_position(commit.note) or commit.operation in _KEEPS_ROWS:
                continue
            match = _SLICES.fullmatch(commit.note.removeprefix(note_prefix(self.run.run_id)))
            if match is None:
                return None
            number, first, last = map(int, match.groups())
            if commit.rows not in (None, sum(self.rows.slice_rows[first : last + 1])):
                return None
            chunks.add(number)
            slices.update(range(first, last + 1))
        return Committed(chunks=frozenset(chunks), slices=frozenset(slices))


def rows_hash(options: JobOptions, checked: Checked) -> str | None:
    """Return a hash of everything that decides which rows a run finds left in an output with given rows.

    Return None if another run cannot be sure to find the same: the input is not a table with versions, the
    condition reads other tables, or the run annotates other rows than exactly those that are left.
    """
    source = checked.source
    is_partial = options.limit is not None or options.incremental or options.canary is not None
    if source.version is None or is_partial or options.retry_errors or options.redo_changed:
        return None
    condition = None
    if options.where is not None:
        condition = condition_of(source.rows)
        if condition is None:
            return None
    decides = {
        "format": _FORMAT,
        "spec_hash": checked.spec.hash,
        "input": source.table_id,
        "version": source.version,
        "input_options": dict(options.input_option),
        "where": [options.where, condition],
        "columns": source.rows.schema.jsonValue(),
        "select": options.select,
        "overrides_column": options.overrides_column,
        "id_columns": checked.id_columns,
        "by_prefix": options.group_by_prefix,
        "compute_each": options.compute_each,
    }
    # Where they are not given, the hash is that of versions without them, whose runs may be resumed.
    later = {"order_by": options.order_by, "reuse": options.reuse}
    decides |= {name: value for name, value in later.items() if value is not None}
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def condition_of(rows: "DataFrame") -> list[str] | None:
    """Return the query's plan, in which the current date and the like are values, and the settings on which it depends.

    Return None if the query reads more than one table, because the other table's rows then matter too.
    """
    if is_connect(rows.sparkSession):  # which shows no plan
        return None
    plan = rows._jdf.queryExecution().optimizedPlan()
    text = re.sub(r"#\d+L?", "", str(plan.toString()))
    if plan.collectLeaves().size() != 1 or "subquery" in text:
        return None
    settings = ("spark.sql.session.timeZone", "spark.sql.ansi.enabled", "spark.sql.caseSensitive")
    values = [str(rows.sparkSession.conf.get(name)) for name in settings]
    return [text, *values]
