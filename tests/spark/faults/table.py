"""A table of prompts, its engine, and what became of its rows.

What is committed is read from Delta's log and its files, without Spark.
"""

import contextlib
import json
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tests.endpoints.faulty_server import FaultyServer
from tests.endpoints.openai_server import echo
from tests.fakes.engine_python import write_engine_python
from tests.fakes.settings import expected_text, fake_config
from tests.spark.delta_log import actions, committed_files

MAX_TOKENS = 16
ROW_PROMPT = "Say "
"""How the prompts of rows begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the output."""

    id: int
    text: str | None
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """The difference between an output and that of an undisturbed run."""

    lost: int
    doubled: int
    changed: int
    """Rows with another answer."""
    condemned: frozenset[int]
    """Ids of error rows."""


NO_DAMAGE = Damage(lost=0, doubled=0, changed=0, condemned=frozenset())


class Table:
    """An input and an output, and an engine for the jobs between them.

    While the table is held, each engine finishes one row every ``held_row_s``. So a job lasts until it was disturbed
    enough. With ``endpoint``, the engines ask this server, which is held in their place.
    """

    def __init__(
        self, directory: Path, *, rows: int, held_row_s: float = 0.05, endpoint: FaultyServer | None = None
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.endpoint = endpoint
        self.directory = directory
        self.input = directory / "in.parquet"
        self.output = directory / "out"
        self.engine = directory / "engine.yaml"
        self._texts: dict[int, str] = {}
        self._hold = directory / "hold"
        if endpoint is None:
            engine = fake_config(
                load_s=1.0,
                held_by=str(self._hold),
                held_row_s=held_row_s,
                child_process=True,
                child_ends_after_s=0.5,
            )
            # Small windows: what a death costs, and the search for a row that kills, end soon.
            self.engine_python = write_engine_python(directory / "python", "--chunk-rows=8", "--max-rows=32")
        else:
            endpoint.held_by, endpoint.held_row_s = self._hold, held_row_s
            engine = endpoint.config()
            self.engine_python = sys.executable
        self.engine.write_text(yaml.safe_dump(engine))
        self.append([f"word {row}" for row in range(rows)])
        self.hold()

    @property
    def name(self) -> str:
        return self.directory.name

    def append(self, texts: list[str]) -> list[int]:
        """Add rows to the input, for the next run; return their ids."""
        ids = list(range(len(self._texts), len(self._texts) + len(texts)))
        self._texts.update(zip(ids, texts, strict=True))
        rows = pa.table({"id": list(self._texts), "text": list(self._texts.values())})
        pq.write_table(rows, self.input)
        return ids

    def hold(self) -> None:
        self._hold.touch()

    def release(self) -> None:
        self._hold.unlink()

    def id(self) -> str:
        """Delta's id of the output."""
        return str(self._metadata()["id"])

    def rows(self) -> list[Row]:
        """Return the committed rows."""
        tables = [pq.read_table(file, columns=["id", "annotation"]) for file in committed_files(self.output)]
        return [
            Row(
                id=row["id"],
                text=row["annotation"]["text"],
                error=(row["annotation"]["error"] or {}).get("code"),
            )
            for table in tables
            for row in table.to_pylist()
        ]

    def damage(self) -> Damage:
        rows = self.rows()
        times = Counter(row.id for row in rows)
        good = [row for row in rows if row.error is None]
        return Damage(
            lost=len(self._texts.keys() - times.keys()),
            doubled=sum(times.values()) - len(times),
            changed=sum(
                row.text != self._expected_text(f"{ROW_PROMPT}{self._texts[row.id]}") for row in good
            ),
            condemned=frozenset(row.id for row in rows if row.error is not None),
        )

    def _expected_text(self, prompt: str) -> str:
        return expected_text(prompt, MAX_TOKENS) if self.endpoint is None else echo(prompt)

    def change_metadata(self) -> None:
        """Commit a table property, as another writer would."""
        metadata = self._metadata()
        metadata["configuration"]["somebody"] = "else"
        draft = self.directory / "commit.json"
        draft.write_text(json.dumps({"metaData": metadata}) + "\n")
        log = self.output / "_delta_log"
        while True:
            with contextlib.suppress(FileExistsError):  # the job has just committed
                os.link(draft, log / f"{len(list(log.glob('*.json'))):020}.json")
                return

    def _metadata(self) -> dict[str, Any]:
        latest: dict[str, Any] = [a["metaData"] for a in actions(self.output) if "metaData" in a][-1]
        return latest
