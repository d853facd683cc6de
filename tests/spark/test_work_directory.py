"""Whose an output is: a run that lives keeps others out, a dead one's leavings are removed."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pipemax.wire import ProcessIdentity
from pipemax_spark.errors import JobError, JobFailedError
from pipemax_spark.rows.chunks import Chunk
from pipemax_spark.rows.workdir import WorkDirectory
from pipemax_spark.storage.hadoop import HadoopFiles
from tests.waiting import wait_until

TABLE = "table-id"


def work_directory(
    spark: Any, base: Path, run_id: str, said: list[str], *, table_id: str = TABLE, **options: Any
) -> WorkDirectory:
    files = HadoopFiles(spark)
    options = {"table_id": table_id, "run_id": run_id, "say": said.append, "dead_after_s": 0.5, **options}
    return WorkDirectory(files, str(base), **options)


def leave_run(directory: Path, **owner: Any) -> None:
    """What a run leaves that was killed."""
    directory.mkdir(parents=True)
    marker = {"kind": "pipemax run", "table_id": TABLE, "run_id": directory.name}
    elsewhere = {"host": "other", "boot_id": "x", "pid_namespace": "y", "pid": 1, "start_ticks": 1}
    (directory / "owner.json").write_text(json.dumps(marker | elsewhere | owner))
    (directory / "heartbeat").write_text("")


def test_a_second_run_is_kept_out_while_the_first_lives(spark: Any, tmp_path: Path) -> None:
    said: list[str] = []
    with work_directory(spark, tmp_path / "work", "first", said):
        with (
            pytest.raises(
                JobError, match=r"another job, run first, is writing to this output now \(process \d+"
            ),
            work_directory(spark, tmp_path / "work", "second", said),
        ):
            pass
        assert (tmp_path / "work" / TABLE / "first").exists(), "the first one's directory is left alone"
    assert not (tmp_path / "work").exists()
    assert said == []


def test_a_run_that_takes_over_waits_until_the_other_one_has_stopped(spark: Any, tmp_path: Path) -> None:
    told: list[str] = []
    said: list[str] = []
    stopping = threading.Event()

    def first() -> None:
        with work_directory(spark, tmp_path / "work", "first", said, heartbeat_s=0.05) as work:
            work.write_manifest({"spec_hash": "hash", "rows": {}})
            begun.set()
            assert stopping.wait(120)
            work.when_told_to_stop(told.append)
            wait_until(lambda: bool(told), 120, "the word to stop")
            raise JobFailedError("stopped")

    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(first)
        assert begun.wait(60)
        stopping.set()
        with work_directory(spark, tmp_path / "work", "second", said, takes_over=True) as work:
            assert [run.run_id for run in work.left_runs] == ["first"], "as of a dead run, its rows are used"
            assert told == ["second"]
            work.drop_left_runs()
        assert isinstance(running.exception(), JobFailedError)
    assert not (tmp_path / "work").exists()
    assert ["is told to stop" in text for text in said] == [True]


def test_a_word_to_stop_that_is_still_being_written_is_read_once_it_is_there(
    spark: Any, tmp_path: Path
) -> None:
    told: list[str] = []
    files = HadoopFiles(spark)
    with work_directory(spark, tmp_path / "work", "first", [], heartbeat_s=0.05) as work:
        work.when_told_to_stop(told.append)
        heartbeat = tmp_path / "work" / TABLE / "first" / "heartbeat"
        files.write_text(f"{work.path}/stop", "")
        beat = heartbeat.stat().st_mtime_ns
        wait_until(lambda: heartbeat.stat().st_mtime_ns > beat, 60, "a heartbeat after the empty word")
        files.write_text(f"{work.path}/stop", "second")
        wait_until(lambda: bool(told), 60, "the word to stop")
    assert told == ["second"]


def test_a_run_that_does_not_stop_keeps_its_directory(spark: Any, tmp_path: Path) -> None:
    said: list[str] = []
    with work_directory(spark, tmp_path / "work", "deaf", said):
        taking = {"takes_over": True, "stops_within_s": 0.2}
        with work_directory(spark, tmp_path / "work", "second", said, **taking) as work:
            assert work.left_runs == []
        assert (tmp_path / "work" / TABLE / "deaf" / "owner.json").exists()
    assert "run deaf does not stop" in said[1]
    assert not (tmp_path / "work").exists()


def test_runs_on_two_tables_share_a_directory(spark: Any, tmp_path: Path) -> None:
    said: list[str] = []
    with work_directory(spark, tmp_path / "work", "first", said):
        with work_directory(spark, tmp_path / "work", "second", said, table_id="another"):
            pass
        assert (tmp_path / "work" / TABLE / "first" / "owner.json").exists()
    assert said == []


def test_a_dead_process_s_directory_is_removed_at_once(spark: Any, tmp_path: Path) -> None:
    said: list[str] = []
    with work_directory(spark, tmp_path / "work", "first", said):
        owner = json.loads((tmp_path / "work" / TABLE / "first" / "owner.json").read_text())
    dead = subprocess.Popen([sys.executable, "-c", ""])
    identity = ProcessIdentity.of(dead.pid)
    dead.wait()
    left = tmp_path / "work" / TABLE / "dead"
    leave_run(left, **owner | {"run_id": "dead", "pid": identity.pid, "start_ticks": identity.start_ticks})
    with work_directory(spark, tmp_path / "work", "second", said):
        assert not left.exists()
    assert said == [], "it did not have to wait and see"


def test_a_run_on_another_machine_is_dead_when_its_heartbeat_stops(spark: Any, tmp_path: Path) -> None:
    said: list[str] = []
    left = tmp_path / "work" / TABLE / "elsewhere"
    leave_run(left)
    with work_directory(spark, tmp_path / "work", "second", said):
        assert not left.exists()
    assert "process 1 on other" in said[0]


def test_a_process_id_of_another_container_says_nothing(spark: Any, tmp_path: Path) -> None:
    """It has this machine's host name and boot id, and its process id may be anybody's here."""
    said: list[str] = []
    with work_directory(spark, tmp_path / "work", "first", said):
        owner = json.loads((tmp_path / "work" / TABLE / "first" / "owner.json").read_text())
    left = tmp_path / "work" / TABLE / "container"
    leave_run(left, **owner | {"run_id": "container", "pid": 2**22 + 1, "pid_namespace": "pid:[1]"})
    with ThreadPoolExecutor(1) as pool:
        was_seen = threading.Event()
        beats = pool.submit(beat_until, was_seen, left)
        try:
            with (
                pytest.raises(JobError, match="another job, run container, is writing"),
                work_directory(spark, tmp_path / "work", "second", said),
            ):
                pass
        finally:
            was_seen.set()
        beats.result()


def beat_until(was_seen: threading.Event, directory: Path) -> None:
    for beat in itertools.count():
        os.utime(directory / "heartbeat", (beat, beat))
        if was_seen.wait(0.05):
            return


FOREIGN: dict[str, dict[str, str]] = {
    "no marker": {"data.csv": "a"},
    "another program's owner.json": {"owner.json": '{"owner": "somebody"}', "heartbeat": ""},
    "a marker that is no JSON": {"owner.json": "somebody"},
    "a marker that is a list": {"owner.json": "[]"},
    "another table's run": {
        "owner.json": '{"kind": "pipemax run", "table_id": "another", "run_id": "another table\'s run"}'
    },
    "a copy of a run's directory": {
        "owner.json": '{"kind": "pipemax run", "table_id": "table-id", "run_id": "run"}'
    },
}


@pytest.mark.parametrize("place", ["work", f"work/{TABLE}"])
def test_foreign_locks_are_neither_deleted_nor_waited_for(spark: Any, tmp_path: Path, place: str) -> None:
    said: list[str] = []
    for name, files in FOREIGN.items():
        (tmp_path / place / name).mkdir(parents=True)
        for file, text in files.items():
            (tmp_path / place / name / file).write_text(text)
    with work_directory(spark, tmp_path / "work", "run", said) as work:
        work.write_manifest({"spec_hash": "hash"})
    kept = {
        path.name: {file.name: file.read_text() for file in path.iterdir()}
        for path in foreign(tmp_path / place)
    }
    assert kept == FOREIGN
    assert said == []
    assert not (tmp_path / "work" / TABLE / "run").exists()


def foreign(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.name != TABLE]


def test_a_run_whose_marker_has_gone_deletes_nothing(spark: Any, tmp_path: Path) -> None:
    with work_directory(spark, tmp_path / "work", "run", []) as work:
        (tmp_path / "work" / TABLE / "run" / "owner.json").unlink()
        (tmp_path / "work" / TABLE / "run" / "somebody's").write_text("data")
        assert work.path.endswith("run")
    assert (tmp_path / "work" / TABLE / "run" / "somebody's").read_text() == "data"


@pytest.mark.parametrize("name", ["owner.json", "manifest.json"])
def test_a_torn_file_that_its_checksum_gives_away_counts_as_none(
    spark: Any, tmp_path: Path, name: str
) -> None:
    """As after the death of a machine; Hadoop keeps a checksum next to each local file."""
    base = tmp_path / "work"
    with contextlib.suppress(JobFailedError), work_directory(spark, base, "first", []) as work:
        work.write_manifest({"spec_hash": "hash", "rows": {}})
        raise JobFailedError("killed")
    torn = base / TABLE / "first" / name
    torn.write_text(torn.read_text()[:20])
    with work_directory(spark, base, "second", []) as work:
        assert work.left_runs == []
    assert torn.exists() == (name == "owner.json"), "without its marker, a directory is not known to be ours"


def test_storage_that_fails_after_the_start_ends_no_run_and_hides_no_error(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left = tmp_path / "work" / TABLE / "run"

    def fail_late() -> None:
        with work_directory(spark, tmp_path / "work", "run", []) as work:
            work.write_manifest({"spec_hash": "hash"})
            (left / "spool" / "chunk-0").mkdir(parents=True)
            (left / "chunks").write_text("a file where a directory should be")
            (left / "ended").mkdir()
            work.note_chunk(Chunk(number=0, first_slice=0, end_slice=1, rows=10))
            raise JobError("the run's own")

    with pytest.raises(JobError, match="the run's own"):
        fail_late()
    assert caplog.text.count("could not be written") == 2
    assert json.loads((left / "manifest.json").read_text())["spec_hash"] == "hash", (
        "its spool can be recovered"
    )
