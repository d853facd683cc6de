"""Keep how far the nights of ``--incremental`` have read their input: a version of it, in the output's own history.

A night ends with a commit without rows, whose note says up to where every row is done. So the position is where the
rows are, a copy or a rollback of the output takes it along, and no other file can contradict it. The output's rows
decide what is done, so a position that is lost or too old costs a comparison and nothing else. An input may lose what a
position means: its log is cleaned up, or it comes back from an older copy and counts its versions again.

Earlier versions of this project kept the position in a file, which is read as long as the output has none.
"""

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from pipemax_spark.errors import CommitRefusedError, JobError
from pipemax_spark.storage.fence import POSITION_NOTE
from pipemax_spark.storage.hadoop import HadoopFiles
from pipemax_spark.storage.output_table import OutputTable
from pipemax_spark.storage.tables import DeltaTable, Transaction

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

log = logging.getLogger(__name__)

RESCAN = (
    "Give --rescan once: it compares all rows of the input with the output and annotates those that are missing, and "
    "the next night goes on from there"
)
"""The way out of each position from which a night cannot go on."""
_RESTORE = "RESTORE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The last version of a table of which every row is done or was skipped."""

    version: int
    commit: str | None
    """Distinguishes this version's commit from any other; None if the table's log did not have it."""
    spec_since: str | None = None
    """The run that brought the spec into the output, or brought it back after its rows were replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nights:
    """The nights that share a position: those over one input, for one spec and one ``--where``."""

    input_id: str
    spec_hash: str
    where: str | None = None
    spec_since: str | None = None
    """See ``Position``."""

    @property
    def name(self) -> str:
        """A name for them, different for other nights."""
        condition = "" if self.where is None else f"-{hashlib.sha256(self.where.encode()).hexdigest()[:16]}"
        return f"{self.input_id}-{self.spec_hash}{condition}"


class Positions:
    """The position of one series of nights, among the notes of the output's commits."""

    def __init__(
        self,
        output: OutputTable,
        nights: Nights,
        *,
        schema: "StructType | None" = None,
        old: "OldPositionFile | None" = None,
    ) -> None:
        """Look at the output, which exists, as it is now: nights are numbered by its version.

        ``schema`` is that of the rows that nights add, ``old`` the file of an earlier version of this project.
        """
        self._output = output
        self._nights = nights
        self._schema = schema
        self._old = old
        self._seen = output.version()
        self._noted: Position | None = None

    def read(self) -> Position | None:
        """Return the position; None if there is none, or if rows that it says are done may have left the output."""
        for commit in self._output.history(-1):
            if commit is None:
                break
            if commit.operation == _RESTORE:
                return None
            if (position := self._in_note(commit.note)) is not None:
                self._noted = position
                return position if position.spec_since == self._nights.spec_since else None
        return None if self._old is None else self._old.read(self._nights.spec_since)

    def write(self, version: int, commit: str | None) -> None:
        """Commit that everything up to this version of the input is done, unless a later night has written already.

        Nights are numbered by the output's version at their start, and a table takes their notes in this order only.
        """
        nights = self._nights
        position = Position(version=version, commit=commit, spec_since=nights.spec_since)
        if position == self._noted:
            return
        note = f"{POSITION_NOTE}{json.dumps({'of': nights.name, **asdict(position)})}"
        digest = hashlib.sha256(f"{self._output.table_id()} {nights.name}".encode()).hexdigest()[:32]
        transaction = Transaction(app_id=f"pipemax-position-{digest}", version=self._seen + 1, note=note)
        try:
            self._output.append_nothing(transaction, self._schema)
        except CommitRefusedError:
            log.warning("a night that began later has noted its position meanwhile")

    def _in_note(self, note: str) -> Position | None:
        if not note.startswith(POSITION_NOTE):
            return None
        fields = json.loads(note.removeprefix(POSITION_NOTE))
        return Position(**fields) if fields.pop("of") == self._nights.name else None


class OldPositionFile:
    """The file in which earlier versions of this project kept the position."""

    def __init__(
        self, files: HadoopFiles, directory: str, nights: Nights, *, warn: Callable[[str], None]
    ) -> None:
        """Name the file, which need not exist. ``warn`` is told of one that cannot be understood."""
        self._files = files
        self._path = f"{directory.rstrip('/')}/{nights.name}.json"
        self._warn = warn

    def read(self, spec_since: str | None) -> Position | None:
        """Return the position; None if there is none, or if the output's rows were replaced since."""
        try:
            fields = json.loads(self._files.read_text(self._path))
            # A file of a still earlier version does not say of which time of the spec it is.
            since = fields.get("spec_since", spec_since)
            position = Position(
                version=int(fields["version"]), commit=fields["commit"], spec_since=spec_since
            )
            return position if since == spec_since else None
        except FileNotFoundError:
            return None
        except (ValueError, LookupError, TypeError):  # the machine may have died while it was written
            self._warn(
                f"{self._path} holds no position, so all rows of the input are compared with the output"
            )
            return None


def check_same_table(table: DeltaTable, position: Position, version: int) -> None:
    """Raise ``JobError`` if the table, which is at ``version``, is an older copy of the one that was read."""
    since = position.version
    if version < since:
        why = f"the table is at version {version}, so an older copy has taken its place"
    elif position.commit is not None and table.commit_mark(since) not in (None, position.commit):
        why = f"version {since} is another commit now, so an older copy of the table has taken its place"
    else:
        return
    raise cannot_follow(table.name, since, why)


def check_position(table: DeltaTable, position: Position, version: int) -> None:
    """Raise ``JobError`` if the table, which is at ``version``, cannot be followed from the position."""
    check_same_table(table, position, version)
    if version > position.version and table.commits_since(position.version) is None:
        why = f"the table's log no longer has all versions after {position.version}"
        raise cannot_follow(table.name, position.version, why)


def cannot_follow(name: str, version: int, why: str) -> JobError:
    """Return the error of a night that cannot go on from the version at which the last one ended."""
    return JobError(
        f"input {name!r} cannot be followed from version {version}, where the last night ended: {why}. {RESCAN}"
    )
