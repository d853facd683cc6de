"""Keep how far the nights of ``--incremental`` have read their input: a version of the table, in a small file.

The file decides only what is read. The output table decides what is done, so a file that is lost or too old costs a
comparison of all rows and nothing else. A table may lose what a position means: its log is cleaned up, or it comes back
from an older copy and counts its versions again.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from pipemax_spark.errors import JobError
from pipemax_spark.storage.hadoop import HadoopFiles
from pipemax_spark.storage.tables import DeltaTable

RESCAN = (
    "Give --rescan once: it compares all rows of the input with the output and annotates those that are missing, and "
    "the next night goes on from there"
)
"""The way out of each position from which a night cannot go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The last version of a table of which every row is done or was skipped."""

    version: int
    commit: str | None
    """Distinguishes this version's commit from any other; None if the table's log did not have it."""
    spec_since: str | None = None
    """The run that brought the spec into the output, or brought it back after its rows were replaced."""


class PositionFile:
    """The position of the nights over one table, for one spec and one ``--where``."""

    def __init__(
        self, files: HadoopFiles, path: str, *, spec_since: str | None, warn: Callable[[str], None]
    ) -> None:
        """Name the file, which need not exist. ``warn`` is told of one that cannot be understood."""
        self._files = files
        self._path = path
        self._spec_since = spec_since
        self._warn = warn

    def read(self) -> Position | None:
        """Return the position; None if there is none yet, or if the output's rows were replaced since."""
        try:
            fields = json.loads(self._files.read_text(self._path))
            # A position of an earlier version of this project does not say of which time of the spec it is.
            since = fields.get("spec_since", self._spec_since)
            position = Position(
                version=int(fields["version"]), commit=fields["commit"], spec_since=self._spec_since
            )
            return position if since == self._spec_since else None
        except FileNotFoundError:
            return None
        except (ValueError, LookupError, TypeError):  # the machine may have died while it was written
            self._warn(
                f"{self._path} holds no position, so all rows of the input are compared with the output"
            )
            return None

    def write(self, table: DeltaTable, version: int) -> None:
        """Write down that everything up to this version is read."""
        commit = table.commit_mark(version)
        position = Position(version=version, commit=commit, spec_since=self._spec_since)
        if position != self.read():
            self._files.write_text(self._path, json.dumps(asdict(position)))


def check_position(table: DeltaTable, position: Position, version: int) -> None:
    """Raise ``JobError`` if the table, which is at ``version``, cannot be followed from the position."""
    since = position.version
    if version < since:
        why = f"the table is at version {version}, so an older copy has taken its place"
    elif position.commit is not None and table.commit_mark(since) not in (None, position.commit):
        why = f"version {since} is another commit now, so an older copy of the table has taken its place"
    elif version > since and table.commits_since(since) is None:
        why = f"the table's log no longer has all versions after {since}"
    else:
        return
    raise cannot_follow(table.name, since, why)


def cannot_follow(name: str, version: int, why: str) -> JobError:
    """Return the error of a night that cannot go on from the version at which the last one ended."""
    return JobError(
        f"input {name!r} cannot be followed from version {version}, where the last night ended: {why}. {RESCAN}"
    )
