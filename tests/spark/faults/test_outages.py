"""What a job needs goes away or stands in its way: the output is that of an undisturbed run."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.spark.faults.cluster import Cluster, assert_as_undisturbed
from tests.spark.processes import wait_until


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two MiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(directory)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


TRACES = {"hang-once": "Thread 0x", "memory-once": "MemoryError", "abort-once": "Fatal Python error: Aborted"}
"""Mark → what the engine's log says of it."""


@pytest.mark.parametrize("mark", TRACES)
def test_an_engine_that_fails_on_a_row_once_costs_no_row(cluster: Cluster, mark: str, tmp_path: Path) -> None:
    marks = {300: f"[[{mark} {tmp_path}/struck]]"}
    order = cluster.submit(input=cluster.input_with(marks))
    assert_as_undisturbed(cluster.answer(order), marked=frozenset(marks))
    assert (tmp_path / "struck").exists()
    assert TRACES[mark] in cluster.logs()


def test_tasks_find_an_engine_again_when_its_socket_is_deleted(cluster: Cluster) -> None:
    order = cluster.submit()
    cluster.wait_until_rows_run()
    victim = cluster.servers()[0]
    cluster.socket_of(victim).unlink()
    assert_as_undisturbed(cluster.answer(order))
    wait_until(lambda: not victim.is_running(), 20, "the server that nobody finds ends")


def test_a_full_work_directory_costs_the_spool_alone(cluster: Cluster, small_disk: Path) -> None:
    order = cluster.submit("job", work_dir=f"file://{small_disk}/work")
    cluster.wait_until_rows_run()
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "filler").write_bytes(b"x" * 4 * 2**20)
    assert_as_undisturbed(cluster.answer(order))


def test_a_table_that_another_writer_changed_ends_the_run_and_the_next_completes_it(cluster: Cluster) -> None:
    output = str(cluster.directory / "contended")
    order = cluster.submit("job", output=output)
    cluster.wait_until_rows_run()
    statement = f"ALTER TABLE delta.`{output}` SET TBLPROPERTIES ('somebody' = 'else')"
    assert cluster.answer(cluster.submit("sql", statement=statement, output="")).error is None
    first = cluster.answer(order)
    assert first.error is not None
    assert "metadata" in first.error.lower()
    assert_as_undisturbed(cluster.answer(cluster.submit("job", output=output)))
