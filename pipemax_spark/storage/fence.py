"""Decide which run may commit to an output table: the latest one that claimed it.

The fencing token is Delta's own transaction pair. The application id names the table and one of its lanes; the version
holds the run's epoch and, below it, the chunk's number. A run claims the table before it computes what is left: it
commits an empty append under each lane with an epoch above all earlier ones. The first lane is claimed before the
others, because its claim decides which run continues if two claim at once. From then on Delta refuses every commit of
an earlier run, whatever its work directory is and however long it was paused: a commit that begins later is skipped,
because its version is too low, and one that was under way fails, because the claim landed meanwhile. Delta's reply does
not say so in either case, so each commit is looked up in the table's history before it counts.

The epoch is one more than the table's version at the claim. It needs no state of its own and only grows, because each
claim is a commit. Two runs that read the same version claim the same epoch, and Delta lets one of them pass.

An Iceberg table has the same numbers among its properties, and refuses a commit in either case (``iceberg_commits``).

On Delta, a claim changes no metadata, so it disturbs neither other writers nor streams that read the table.
"""

import hashlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from pipemax_spark.errors import CommitRefusedError, JobFailedError, TakenOverError
from pipemax_spark.storage.output_table import OutputTable
from pipemax_spark.storage.tables import Commit, Transaction

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

LANES = 6
"""Maximum number of commits of one run in progress at once; each lane commits its chunks in ascending order.

A run claims all lanes, needed or not, because a run that claimed fewer could not fence off a run that uses more. With
six, a node that is ten times slower than the others costs the others no time (``lab/results/scale.md``)."""
_CHUNK_BITS = 24
_ATTEMPTS = 10
_RECENT_COMMITS = 100
_CLAIM_NOTE, _RUN_NOTE, _REMARK = "pipemax claim by run ", "pipemax run ", "; "
_REMEMBERED_COMMITS = 1_000
"""Of a job of days, which commits every few minutes, the claim is among them."""
CANARY_NOTE = " of the canary"
"""Ends the note of a commit of rows that are compared with earlier ones before the run goes on."""
POSITION_NOTE = "pipemax position "
"""Begins the note of a commit without rows that says how far nights have read their input (``rows.position``)."""
_RUN_IN_NOTE = re.compile(r"(?:^pipemax|recovers) run (\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A run's right to commit, which lasts until another run claims the table."""

    table: OutputTable
    run_id: str
    epoch: int

    @classmethod
    def take(
        cls,
        table: OutputTable,
        run_id: str,
        *,
        schema: "StructType | None" = None,
        remark: str | None = None,
    ) -> "Claim":
        """Fence off all earlier runs. Raise ``JobFailedError`` if another run claims the table at the same moment.

        ``schema`` is that of the rows to come, for a table that has columns which only Delta may fill; without it, the
        claim has all of the table's columns. ``remark`` ends the note of the claim's first commit; see ``remarks``.
        """
        for _ in range(_ATTEMPTS):
            claim = cls(table=table, run_id=run_id, epoch=table.version() + 1)
            if claim._take_lanes(schema, remark):
                return claim
            if claim._claimed_by_another():
                raise TakenOverError(claim.taken_over())
            # A chunk of the run that is being fenced off landed meanwhile, under the same application id.
        raise JobFailedError(
            f"{table.name} cannot be claimed: another run keeps committing to it; run one job"
        )

    def _take_lanes(self, schema: "StructType | None", remark: str | None) -> bool:
        note = f"{_CLAIM_NOTE}{self.run_id}: epoch {self.epoch}, lane "
        end = "" if remark is None else f"{_REMARK}{remark}"
        first = self._transaction(0, 0, f"{note}0{end}")
        others = [self._transaction(lane, 0, f"{note}{lane}") for lane in range(1, LANES)]
        try:
            self.table.append_nothing(first, schema)
            # A run that was skipped here must claim no other lane, or two runs could refuse each other.
            if self.table.find_commit(first.note, since_version=self.epoch - 1) is None:
                return False
            num_at_once = 1 if self.table.takes_one_append_at_a_time else len(others)
            with ThreadPoolExecutor(num_at_once, thread_name_prefix="pipemax-claim") as pool:
                for append in [pool.submit(self.table.append_nothing, claim, schema) for claim in others]:
                    append.result()
        except CommitRefusedError:
            return False
        landed = set(self.table.notes(_CLAIM_NOTE, since_version=self.epoch - 1))
        return all(claim.note in landed for claim in others)

    def directly_follows(self, version: int) -> bool:
        """Tell whether the table holds, beyond this version, nothing but this claim."""
        return self.table.version() == version + LANES

    def chunk(self, number: int, *, lane: int, origin: str = "") -> Transaction:
        """Return the transaction of the run's chunk ``number``, counted over all batches; ``origin`` ends the note."""
        return self._transaction(lane, number + 1, f"{note_prefix(self.run_id)}{number}{origin}")

    def recovery(self, number: int, *, dead_run_id: str) -> Transaction:
        """Return the transaction of rows that a dead run had completed; ``number`` is an unused chunk number."""
        return self._transaction(0, number + 1, f"{_recovery_prefix(self.run_id)}{dead_run_id}")

    def reuse(self, number: int, *, table: str) -> Transaction:
        """Return the transaction of rows with answers of an earlier table; ``number`` is an unused chunk number."""
        return self._transaction(0, number + 1, f"{_reuse_prefix(self.run_id)}{table}")

    def removal(self, number: int) -> Transaction:
        """Return the transaction that removes rows of other specs; ``number`` is an unused chunk number."""
        return self._transaction(0, number + 1, _removal_note(self.run_id))

    def deletion(self, number: int, *, what: str) -> Transaction:
        """Return the transaction about rows that the input has deleted; ``number`` is an unused chunk number."""
        return self._transaction(0, number + 1, f"{_RUN_NOTE}{self.run_id} {what}")

    def forgetting(self) -> Transaction:
        """Return the transaction that removes rows which are to be forgotten, the only one of its run."""
        return self._transaction(0, 1, f"{_RUN_NOTE}{self.run_id} forgets rows")

    def landed(self, transaction: Transaction, *, expected_rows: int | None = None) -> Commit:
        """Return the commit, once it is found in the table's history with all its rows.

        Otherwise raise ``JobFailedError``, which says why.
        """
        commit = self.table.find_commit(transaction.note, since_version=self.epoch - 1)
        if commit is None:
            raise TakenOverError(self.taken_over())
        if expected_rows is not None and commit.rows is not None and commit.rows != expected_rows:
            raise JobFailedError(
                f"{transaction.note} was to add {expected_rows:,} rows and added {commit.rows:,} "
                f"({commit.rows - expected_rows:+,}; version {commit.version} of {self.table.name}); nothing more is "
                "committed"
            )
        return commit

    def taken_over(self) -> str:
        """Return why this run can no longer commit, as one error text."""
        other = self._claimed_by_another()
        by = f"run {other}" if other else "another run"
        return (
            f"the output {self.table.name} was taken over by {by} while this run, {self.run_id}, was working; "
            f"{self.table.format_name} refused this run's commit, and what it had committed before stays. Run one "
            "job at a time on an output"
        )

    def _claimed_by_another(self) -> str | None:
        """Return another run that has claimed the table with this epoch or a later one, or None."""
        for note in self.table.notes(_CLAIM_NOTE, since_version=self.epoch - 1):
            run_id, _, epoch = note.removeprefix(_CLAIM_NOTE).partition(": epoch ")
            if run_id != self.run_id and int(epoch.partition(",")[0]) >= self.epoch:
                return run_id
        return None

    def _transaction(self, lane: int, below: int, note: str) -> Transaction:
        """Return a transaction of this epoch; ``below`` is the part of the version below the epoch."""
        assert 0 <= below < 1 << _CHUNK_BITS, f"chunk {below - 1} does not fit into {_CHUNK_BITS} bits"
        digest = hashlib.sha256(self.table.table_id().encode()).hexdigest()[:32]
        return Transaction(
            app_id=f"pipemax-{digest}-{lane}", version=(self.epoch << _CHUNK_BITS) | below, note=note
        )


def note_prefix(run_id: str) -> str:
    """Return how the notes of all chunks of a run begin; the chunk's number follows."""
    return f"{_RUN_NOTE}{run_id} chunk "


def is_claim(note: str) -> bool:
    """Tell whether the note is that of a claim, by whichever run."""
    return note.startswith(_CLAIM_NOTE)


def is_position(note: str) -> bool:
    """Tell whether the note is that of a night's position, whose commit has no rows."""
    return note.startswith(POSITION_NOTE)


def remarks(table: OutputTable) -> Iterator[str]:
    """Yield the remarks of the claims among the table's last commits, the latest first."""
    for commit in islice(table.history(-1), _REMEMBERED_COMMITS):
        if commit is not None and is_claim(commit.note):
            _, is_there, remark = commit.note.partition(_REMARK)
            if is_there:
                yield remark


def is_claim_by(run_id: str, note: str) -> bool:
    """Tell whether the note is that of a claim by this run."""
    return note.startswith(f"{_CLAIM_NOTE}{run_id}:")


def is_before_chunks_of(run_id: str, note: str) -> bool:
    """Tell whether the note is that of a commit which this run made before it wrote down the rows to compute.

    It has rows of a dead run, or with answers of an earlier table, or removes rows of other specs.
    """
    return note.startswith((_recovery_prefix(run_id), _reuse_prefix(run_id), _removal_note(run_id)))


def recovered_by(table: OutputTable, run_id: str) -> list[str]:
    """Return the dead runs whose completed rows this run has committed, as far as the table's last commits tell."""
    prefix = _recovery_prefix(run_id)
    return [note.removeprefix(prefix) for note in table.recent_notes(prefix, commits=_RECENT_COMMITS)]


def committed_since(table: OutputTable, version: int, *, besides: str) -> str | None:
    """Return a run other than ``besides`` that has committed rows after this version, or None."""
    for note in table.notes(_RUN_NOTE, since_version=version):
        run_id = note.removeprefix(_RUN_NOTE).partition(" ")[0]
        if run_id != besides:
            return run_id
    return None


def recent_runs(table: OutputTable) -> list[str]:
    """Return the runs that have committed rows, the latest first, as far as the table's last commits tell."""
    notes = table.recent_notes(_RUN_NOTE, commits=_RECENT_COMMITS)
    return list(dict.fromkeys(note.removeprefix(_RUN_NOTE).partition(" ")[0] for note in notes))


def runs_past_canary(table: OutputTable) -> list[str]:
    """Return those of the recent runs that have computed and committed more than their canary, the latest first.

    A run may have committed rows of a dead run, or answers of an earlier table, before its canary.
    """
    notes = table.recent_notes(_RUN_NOTE, commits=_RECENT_COMMITS)
    chunks = (note.removeprefix(_RUN_NOTE).partition(" chunk ") for note in notes)
    past = (run_id for run_id, of_chunk, rest in chunks if of_chunk and not rest.endswith(CANARY_NOTE))
    return list(dict.fromkeys(past))


def runs_named(table: OutputTable) -> frozenset[str]:
    """Return the runs that have committed rows or whose rows were recovered, as far as the last commits tell."""
    notes = table.recent_notes(_RUN_NOTE, commits=_RECENT_COMMITS)
    return frozenset(run for note in notes for run in _RUN_IN_NOTE.findall(note))


def _reuse_prefix(run_id: str) -> str:
    return f"{_RUN_NOTE}{run_id} reuses answers of "


def _removal_note(run_id: str) -> str:
    return f"{_RUN_NOTE}{run_id} removes rows of other specs"


def _recovery_prefix(run_id: str) -> str:
    return f"{_RUN_NOTE}{run_id} recovers run "
