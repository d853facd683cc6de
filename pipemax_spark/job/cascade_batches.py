"""A cascade over a table that grows: each batch of new rows is an epoch of its own, under one ledger for each answer.

The position of the nights and what a batch holds are those of any job with ``--incremental``; this module has each
batch written down, opened under the ledgers that the batch before it has left, and counted as seen once it is closed.
An epoch is one of the ledgers if the first run to draw for it was incremental; else it has a certificate.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pipemax_spark.cascade.batches import ClosedBatch, OpenBatch
from pipemax_spark.cascade.ledger import Ledger
from pipemax_spark.cascade.promise import Promise
from pipemax_spark.cascade.records import ordinal
from pipemax_spark.errors import JobFailedError
from pipemax_spark.job.batches import batches_of, check_appended, chosen_rows, counted_rows
from pipemax_spark.job.cascade_decisions import CERTIFICATE, DRAW
from pipemax_spark.job.cascade_rows import manifest_digest
from pipemax_spark.job.job import Job, JobCall
from pipemax_spark.options import JobOptions
from pipemax_spark.report.summary import Summary
from pipemax_spark.rows.checked import Checked
from pipemax_spark.rows.incremental import reading
from pipemax_spark.rows.remaining import Remaining
from pipemax_spark.spark.sql import literal
from pipemax_spark.storage.cascade_store import CascadeStore, Epochs
from pipemax_spark.storage.output_table import OutputTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_RunsEpoch = Callable[[JobOptions, Checked, CascadeStore, Epochs], Summary | None]
_NUMBER_PROPERTY = "pipemax.cascade.draws."
"""Of the output, by spec: how often its draws have begun again. It outlives a work directory."""


def run_batches(job: Job, epochs: Epochs, run: _RunsEpoch) -> list[Summary | None]:
    """Finish the batch that an earlier run has left, then take each new one; return how the epochs ended.

    ``run`` runs an epoch, whose input is the whole table in ``Checked.source``. After one that is not complete nothing
    more is read, and the position stays: the next run gets the same rows again.
    """
    summaries: list[Summary | None] = []

    def is_finished(store: CascadeStore, whole: "DataFrame") -> bool:
        checked = replace(job.checked, source=replace(job.checked.source, rows=whole))
        summary = run(job.options, checked, store, epochs)
        summaries.append(summary)
        return summary is not None and summary.complete

    store = epochs.open()
    if store is not None and not is_finished(store, job.checked.source.rows):
        return summaries
    new_rows = 0
    with batches_of(job) as batches:
        for batch in batches:
            chosen = chosen_rows(job, batch)
            with reading(job.checked.source.name, chosen):
                new_rows += counted_rows(job, chosen)
            store = epochs.begin(job.remaining.left(chosen, job.remaining.done_if_any()))
            whole = job.checked.source.rows if chosen.whole is None else chosen.whole
            if store is not None and not is_finished(store, whole):
                return summaries
    if new_rows == 0:
        check_appended(job, 0)
    return summaries


class TableLedger:
    """The ledgers of one output under one spec, over the epochs that have begun."""

    def __init__(
        self, epochs: Epochs, promise: Promise, *, answers: Sequence[str], spec_hash: str, small_model: str
    ) -> None:
        """``answers`` are the names of a row's answers, each of which has the ``promise``."""
        self._answers = answers
        self._epochs = epochs
        self._promise = promise
        self._spec_hash = spec_hash
        self._small_model = small_model

    def batch_of(self, store: CascadeStore, *, is_incremental: bool) -> OpenBatch | None:
        """Return the epoch as a batch of the ledgers, opened at its first look; None for one with a certificate."""
        text = store.record(DRAW)
        if text is None and is_incremental:
            text = store.put(DRAW, self._opened(store).to_json())
        return None if text is None else OpenBatch.from_json(text)

    def kept(self, store: CascadeStore) -> int:
        """Return how many rows of the epoch keep the small answer, once its answers are there."""
        return store.read("answers").where(f"annotation.model = {literal(self._small_model)}").count()

    def _opened(self, store: CascadeStore) -> OpenBatch:
        ledgers, kept = self._before(store)
        rows = store.rows().count()
        if ledgers is None:
            number, _ = self._epochs.last_reset()
            first = Ledger.begin(self._promise, first_rows=rows, spec_hash=self._spec_hash, number=number)
            ledgers = dict.fromkeys(self._answers, first)
        return OpenBatch.of(
            ledgers, rows=rows, manifest_digest=manifest_digest(store.rows()), kept_before=kept
        )

    def _before(self, store: CascadeStore) -> tuple[Mapping[str, Ledger] | None, int]:
        """Return the ledgers that the latest earlier batch has left, and how many rows keep the small answers."""
        for earlier in self._epochs.before(store):
            text = earlier.record(DRAW)
            batch = None if text is None else OpenBatch.from_json(text)
            if batch is None:
                continue  # an epoch with a certificate, or whose rows went to the large model alone
            if not batch.is_audited:
                return batch.after_large_model, batch.kept_before
            end = earlier.record(CERTIFICATE)
            if end is None:
                raise JobFailedError(
                    f"{earlier.path('records')} lacks how batch {batch.draw.number} of the ledger ended; give "
                    "--cascade-reset once, which begins a new ledger"
                )
            closed = ClosedBatch.all_from_json(end)
            left = {name: of_answer.ledger for name, of_answer in closed.items()}
            return left, batch.kept_before + self.kept(earlier)
        return None, 0


def reset_if_needed(call: JobCall, checked: Checked, epochs: Epochs, say: Callable[[str], None]) -> None:
    """Let the draws begin again if the user says so, or if the ledger of rows that are done is gone."""
    count, (number, begun) = epochs.count(), epochs.last_reset()
    if call.options.cascade_reset:
        if count == begun:
            say("nothing was drawn since the last reset, so --cascade-reset has nothing to give up")
            return
        number = _reset(epochs, call.table, checked.spec.hash)
        say(f"--cascade-reset: the table's {ordinal(number)} draw begins; what is in the output stays")
    elif call.options.incremental and count == 0 and number == 1:
        done = Remaining(call.table, call.options, checked).done_if_any()
        if done is None or done.isEmpty():
            return
        number = _reset(epochs, call.table, checked.spec.hash)
        call.terminal.warn(
            "the cascade's ledger is gone with its work directory: its promise stands for the rows that it committed, "
            f"and the table's {ordinal(number)} ledger begins with the rows from now on"
        )


def _reset(epochs: Epochs, table: OutputTable, spec_hash: str) -> int:
    """Give up what was drawn. Return the number of the draws that begin, by the table's count too."""
    name = f"{_NUMBER_PROPERTY}{spec_hash}"
    number = epochs.reset(known_number=int(table.properties().get(name, "1")))
    table.set_properties({name: str(number)})
    return number
