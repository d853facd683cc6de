"""Which files a table has: plain Parquet, and the current version of a Delta table by its log."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipemax.policy.table_files import table_files


def write(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": ["a"]}), path)
    return path


def commit(table: Path, version: int, *actions: dict[str, Any]) -> None:
    (table / "_delta_log").mkdir(parents=True, exist_ok=True)
    text = "\n".join(json.dumps(action) for action in actions)
    (table / "_delta_log" / f"{version:020}.json").write_text(text)


def metadata(**configuration: str) -> dict[str, Any]:
    return {"metaData": {"id": "t", "configuration": configuration}}


def test_a_file_is_itself_and_hidden_files_are_not_in_a_directory(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.parquet"), write(tmp_path / "day=1" / "b.parquet")
    write(tmp_path / "_temporary" / "c.parquet")
    write(tmp_path / ".d.parquet")
    assert table_files(first) == [first]
    assert table_files(tmp_path) == [first, second]


def test_a_delta_table_has_what_was_added_and_not_removed(tmp_path: Path) -> None:
    commit(tmp_path, 0, metadata(), {"add": {"path": "old.parquet"}}, {"add": {"path": "kept%20one.parquet"}})
    commit(tmp_path, 1, {"remove": {"path": "old.parquet"}}, {"add": {"path": "day=1/new.parquet"}})
    write(tmp_path / "old.parquet")
    assert table_files(tmp_path) == [tmp_path / "day=1" / "new.parquet", tmp_path / "kept one.parquet"]


@pytest.mark.parametrize("parts", [None, 2])
def test_a_checkpoint_stands_for_the_commits_before_it(tmp_path: Path, parts: int | None) -> None:
    log = tmp_path / "_delta_log"
    commit(tmp_path, 0, {"add": {"path": "compacted away.parquet"}})  # which nobody need read again
    commit(tmp_path, 3, {"remove": {"path": "one.parquet"}}, {"add": {"path": "three.parquet"}})
    (log / "_last_checkpoint").write_text(json.dumps({"version": 2, "size": 2, "parts": parts}))
    names = [f"{2:020}.checkpoint.parquet"]
    if parts:
        names = [f"{2:020}.checkpoint.{part:010}.{parts:010}.parquet" for part in (1, 2)]
    struct, mapping = pa.struct([("path", pa.string())]), pa.map_(pa.string(), pa.string())
    rows: list[list[dict[str, Any]]] = [[{"path": "one.parquet"}], [{"path": "two.parquet"}]]
    if not parts:
        rows = [rows[0] + rows[1]]
    for name, added in zip(names, rows, strict=True):
        meta = pa.array(
            [{"configuration": []}] + [None] * (len(added) - 1), pa.struct([("configuration", mapping)])
        )
        pq.write_table(pa.table({"add": pa.array(added, struct), "metaData": meta}), log / name)
    assert [file.name for file in table_files(tmp_path)] == ["three.parquet", "two.parquet"]


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([metadata(**{"delta.columnMapping.mode": "name"})], "maps its columns by name"),
        ([{"add": {"path": "s3://elsewhere/a.parquet"}}], "refers to a file outside of it"),
        ([metadata()], "has no Parquet files"),
    ],
)
def test_a_delta_table_that_cannot_be_read_here_is_refused(
    tmp_path: Path, actions: list[dict[str, Any]], message: str
) -> None:
    commit(tmp_path, 0, *actions)
    with pytest.raises(ValueError, match=message):
        table_files(tmp_path)


def test_a_checkpoint_that_is_missing_or_of_the_second_kind_is_refused(tmp_path: Path) -> None:
    commit(tmp_path, 1, {"add": {"path": "a.parquet"}})
    (tmp_path / "_delta_log" / "_last_checkpoint").write_text(json.dumps({"version": 0}))
    with pytest.raises(ValueError, match="no classic checkpoint"):
        table_files(tmp_path)
    name = tmp_path / "_delta_log" / f"{0:020}.checkpoint.parquet"
    pq.write_table(pa.table({"sidecar": ["x"]}), name)
    with pytest.raises(ValueError, match="V2 checkpoint"):
        table_files(tmp_path)


def test_no_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no table at"):
        table_files(tmp_path / "gone")
