"""The Parquet files of a table in a directory of this machine: plain Parquet, or the current version of a Delta table.

It reads Delta's log by itself, since the engine's environment has no Spark: commits as JSON and classic checkpoints. It
does not read deletion vectors, so a sample may have rows that were deleted, which changes little in their lengths. It
refuses what would give wrong columns or files: column mapping, V2 checkpoints, files outside of the table's directory.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow.parquet as pq

_LOG = "_delta_log"
_ACTIONS = ["add", "remove", "metaData"]


def table_files(path: Path) -> list[Path]:
    """Return the table's Parquet files. ``ValueError`` if there are none, or if the Delta table cannot be read here."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(
            f"no table at {path}: give a Parquet file, or a directory with a Parquet or Delta table"
        )
    if (path / _LOG).is_dir():
        files = _delta_files(path)
    else:
        files = sorted(file for file in path.rglob("*.parquet") if not _is_hidden(file.relative_to(path)))
    if not files:
        raise ValueError(f"the table at {path} has no Parquet files")
    return files


def _is_hidden(file: Path) -> bool:
    return any(part.startswith(("_", ".")) for part in file.parts)


def _delta_files(table: Path) -> list[Path]:
    log = table / _LOG
    current: set[str] = set()
    first = 0
    pointer = log / "_last_checkpoint"
    if pointer.is_file():
        checkpoint = json.loads(pointer.read_text(encoding="utf-8"))
        first = int(checkpoint["version"]) + 1
        _apply(_checkpoint_actions(log, checkpoint), current, table)
    commits = sorted(file for file in log.glob("*.json") if file.stem.isdecimal())
    for commit in commits:
        if int(commit.stem) >= first:
            lines = commit.read_text(encoding="utf-8").splitlines()
            _apply((json.loads(line) for line in lines if line.strip()), current, table)
    return [_data_file(table, name) for name in sorted(current)]


def _checkpoint_actions(log: Path, checkpoint: dict[str, Any]) -> Iterable[dict[str, Any]]:
    version, parts = int(checkpoint["version"]), checkpoint.get("parts")
    names = [f"{version:020}.checkpoint.parquet"]
    if parts:
        names = [f"{version:020}.checkpoint.{part:010}.{parts:010}.parquet" for part in range(1, parts + 1)]
    for name in names:
        if not (log / name).is_file():
            raise ValueError(
                f"the Delta table at {log.parent} has no classic checkpoint {name}; V2 is not read here"
            )
        file = pq.ParquetFile(log / name)
        columns = [action for action in _ACTIONS if action in file.schema_arrow.names]
        if "sidecar" in file.schema_arrow.names:
            raise ValueError(f"the Delta table at {log.parent} has a V2 checkpoint, which is not read here")
        yield from file.read(columns=columns).to_pylist()


def _apply(actions: Iterable[dict[str, Any]], current: set[str], table: Path) -> None:
    for action in actions:
        if (added := action.get("add")) is not None:
            current.add(added["path"])
        elif (removed := action.get("remove")) is not None:
            current.discard(removed["path"])
        elif (metadata := action.get("metaData")) is not None:
            mode = dict(metadata.get("configuration") or {}).get("delta.columnMapping.mode", "none")
            if mode != "none":
                raise ValueError(
                    f"the Delta table at {table} maps its columns by {mode}, which is not read here: write a sample as "
                    "Parquet"
                )


def _data_file(table: Path, name: str) -> Path:
    if "://" in name or name.startswith(("/", "file:")):
        raise ValueError(f"the Delta table at {table} refers to a file outside of it: {name}")
    return table / unquote(name)
