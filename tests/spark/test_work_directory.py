"""Whose an output is: a run that lives keeps others out, a dead one's leavings are removed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipemax.wire import ProcessIdentity
from pipemax_spark.chunks import Chunk
from pipemax_spark.errors import JobError
from pipemax_spark.hadoop import HadoopFiles
from pipemax_spark.workdir import WorkDirectory


def work_directory(spark: Any, root: Path, run_id: str, said: list[str]) -> WorkDirectory:
    return WorkDirectory(HadoopFiles(spark), str(root), run_id=run_id, say=said.append, dead_after_s=0.5)


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
        assert (tmp_path / "work" / "first").exists(), "the first one's directory is left alone"
    assert not (tmp_path / "work").exists()
    assert said == []


def test_a_dead_process_s_directory_is_removed_at_once(spark: Any, tmp_path: Path) -> None:
    said: list[str] = []
    with work_directory(spark, tmp_path / "work", "first", said):
        owner = json.loads((tmp_path / "work" / "first" / "owner.json").read_text())
    dead = subprocess.Popen([sys.executable, "-c", ""])
    identity = ProcessIdentity.of(dead.pid)
    dead.wait()
    left = tmp_path / "work" / "dead"
    left.mkdir(parents=True)
    owner |= {"pid": identity.pid, "start_ticks": identity.start_ticks}
    (left / "owner.json").write_text(json.dumps(owner))
    with work_directory(spark, tmp_path / "work", "second", said):
        assert not left.exists()
    assert said == [], "it did not have to wait and see"


def test_a_run_of_another_machine_is_dead_when_its_heart_stands_still(spark: Any, tmp_path: Path) -> None:
    said: list[str] = []
    left = tmp_path / "work" / "elsewhere"
    left.mkdir(parents=True)
    (left / "owner.json").write_text('{"host": "other", "boot_id": "x", "pid": 1, "start_ticks": 1}')
    (left / "heartbeat").write_text("")
    with work_directory(spark, tmp_path / "work", "second", said):
        assert not left.exists()
    assert "process 1 on other" in said[0]


def test_storage_that_fails_after_the_start_ends_no_run_and_hides_no_error(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left = tmp_path / "work" / "run"

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
