"""Completions that outlive their task: read back once each, whatever state the files are in."""

import contextlib
import ctypes
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemax.wire import COMPLETION_SCHEMA
from pipemax_spark.executor.spool import Spool, arrow_location, dealt_directory, spool_fault


def completions(texts: list[str | None]) -> pa.RecordBatch:
    """Without a text, an error row."""
    rows = [
        {
            "row_id": i,
            "text": text,
            "finish_reason": "stop",
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "error_code": None if text is not None else "engine_error",
            "completed_at": i,
        }
        for i, text in enumerate(texts)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=COMPLETION_SCHEMA)


def write(directory: Path, keys: list[str], *, partition: int = 0) -> None:
    with Spool(str(directory), partition=partition) as spool:
        spool.keep(pa.array(keys), completions([f"answer to {key}" for key in keys]))


def recall(directory: Path, keys: list[str], *, partition: int = 0) -> pa.RecordBatch:
    with Spool(str(directory), partition=partition) as spool:
        return spool.recall(keys, pa.array(range(len(keys)), pa.int64()))


@contextlib.contextmanager
def renames(directory: Path) -> Iterator[Callable[[], int]]:
    """Yield a function that counts, by the kernel's notifications, names that were given up or taken in a rename."""
    libc = ctypes.CDLL(None, use_errno=True)
    moved_from, moved_to, nonblocking = 0x40, 0x80, 0x800
    watch = libc.inotify_init1(nonblocking)
    assert libc.inotify_add_watch(watch, str(directory).encode(), moved_from | moved_to) >= 0

    def count() -> int:
        try:
            events, number = os.read(watch, 1 << 16), 0
        except BlockingIOError:
            return 0
        while events:
            (name_bytes,) = struct.unpack_from("I", events, 12)
            events, number = events[16 + name_bytes :], number + 1
        return number

    try:
        yield count
    finally:
        os.close(watch)


def test_a_later_attempt_finds_what_an_earlier_one_completed(tmp_path: Path) -> None:
    write(tmp_path, ["a", "b"])
    write(tmp_path, ["c"])
    found = recall(tmp_path, ["x", "c", "a"])
    assert found.schema == COMPLETION_SCHEMA
    assert found.select(["row_id", "text"]).to_pylist() == [
        {"row_id": 1, "text": "answer to c"},
        {"row_id": 2, "text": "answer to a"},
    ]
    assert recall(tmp_path, ["a"], partition=12).num_rows == 0, "another partition's are not read"
    write(tmp_path, ["d"], partition=12)
    directories = Counter(file.parent.name for file in tmp_path.rglob("*.parquet"))
    assert directories == {"part-00000": 2, "part-00012": 1}, "no attempt lists the files of others"
    assert recall(tmp_path / "nowhere", ["a"]).num_rows == 0


def test_a_file_is_written_under_its_own_name_and_never_renamed(tmp_path: Path) -> None:
    """Object stores cannot rename: they copy and delete."""
    directory = tmp_path / "part-00000"
    directory.mkdir()
    with renames(directory) as seen:
        write(tmp_path, ["a"])
        write(tmp_path, ["b"])
        assert len(list(directory.iterdir())) == 2
        assert seen() == 0
        next(directory.iterdir()).rename(directory / "another")
        assert seen() == 2, "a rename would have been seen"


def test_error_rows_are_retried(tmp_path: Path) -> None:
    with Spool(str(tmp_path), partition=0) as spool:
        spool.keep(pa.array(["good", "bad"]), completions(["fine", None]))
    assert recall(tmp_path, ["good", "bad"]).column("text").to_pylist() == ["fine"]


@given(kept=st.lists(st.sampled_from("abc")), asked=st.lists(st.sampled_from("abcd")))
def test_a_completion_serves_one_row(
    kept: list[str], asked: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("spool")
    write(directory, kept)
    found = Counter(recall(directory, asked).column("text").to_pylist())
    expected = Counter(kept) & Counter(asked)
    assert found == Counter({f"answer to {key}": count for key, count in expected.items()})


def test_torn_and_half_written_files_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, ["a"])
    write(tmp_path, ["b"])
    torn, _ = sorted(tmp_path.glob("part-00000/*"))
    lost = {"answer to a": "a", "answer to b": "b"}
    (kept,) = [text for text in lost if text.encode() not in torn.read_bytes()]
    torn.write_bytes(torn.read_bytes()[:-50])
    (tmp_path / "part-00000" / "half.parquet").write_bytes(b"PAR1")
    assert recall(tmp_path, ["a", "b"]).column("text").to_pylist() == [kept]
    assert "is skipped, and its rows are annotated again" in caplog.text


def test_storage_that_fails_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    write(tmp_path / "file", ["a"])
    assert "completions are no longer spooled" in caplog.text
    assert spool_fault(str(tmp_path / "file")) is not None
    assert spool_fault(str(tmp_path / "new")) is None
    assert "Unrecognized filesystem" in (spool_fault("oddfs://x/y") or "")


def test_checking_a_directory_touches_none_of_its_files(tmp_path: Path) -> None:
    users = tmp_path / "_probe"
    users.write_text("the user's")
    assert spool_fault(str(tmp_path)) is None
    assert users.exists()
    assert users.read_text() == "the user's"
    assert list(tmp_path.iterdir()) == [users]


@pytest.mark.parametrize(
    ("directory", "location"),
    [
        ("dbfs:/Volumes/main/sales/work", "/Volumes/main/sales/work"),
        ("dbfs:///Volumes/main/sales/work", "/Volumes/main/sales/work"),
        ("dbfs:/Volumes", "/Volumes"),
        ("dbfs:/VolumesOfOld/work", "/dbfs/VolumesOfOld/work"),
        ("dbfs:/x", "/dbfs/x"),
        ("/Volumes/main/sales/work", "/Volumes/main/sales/work"),
        ("s3a://bucket/work", "s3://bucket/work"),
    ],
)
def test_tasks_open_databricks_paths_where_databricks_mounts_them(directory: str, location: str) -> None:
    assert arrow_location(directory) == location


def test_no_more_than_the_limit_is_read_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for key in "abc":
        write(tmp_path, [key])
    with Spool(str(tmp_path), partition=0, most_read_bytes=200) as spool:
        found = spool.recall(list("abc"), pa.array(range(3), pa.int64()))
    assert 0 < found.num_rows < 3
    assert "what follows is skipped" in caplog.text


def test_rows_are_dealt_as_they_were_the_first_time(tmp_path: Path) -> None:
    root = str(tmp_path / "name")
    assert dealt_directory(root, 8) == (f"{root}/of-8", 8)
    assert dealt_directory(root, 32) == (f"{root}/of-8", 8)


def test_a_task_beats_for_its_run_and_keeps_nothing_once_that_is_removed(tmp_path: Path) -> None:
    beats, spooled = tmp_path / "heartbeat", tmp_path / "spool"
    beats.touch()
    with Spool(str(spooled), partition=0, beats=str(beats)) as spool:
        spool.keep(pa.array(["a"]), completions(["answer"]))
    assert float(beats.read_text()) > 0
    assert recall(spooled, ["a"]).num_rows == 1
    beats.unlink()
    with Spool(str(spooled), partition=1, beats=str(beats)) as spool:
        spool.keep(pa.array(["b"]), completions(["answer"]))
    assert not beats.exists()
    assert not (spooled / "part-00001").exists()
