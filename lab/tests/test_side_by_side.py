"""Jobs run next to each other in forked processes, and none outlives the others' end."""

import os
import subprocess
import time
from pathlib import Path

from lab.gpu.side_by_side import Job, run_together
from lab.tests.processes import is_running

NEVER_S = 1e6


def test_each_job_has_its_own_environment_output_and_result(tmp_path: Path) -> None:
    def tell() -> None:
        subprocess.run(["sh", "-c", "echo $WHO"], check=True)

    def fail() -> None:
        raise ValueError("on purpose")

    jobs = [
        Job(name="a", work=tell, environment={"WHO": "a job"}),
        Job(name="b", work=tell, environment={"WHO": "another"}),
        Job(name="c", work=fail),
    ]
    ends = {end.name: end.result for end in run_together(jobs, tmp_path, limit_s=100.0)}
    assert ends == {"a": "done", "b": "done", "c": "failed"}
    assert (tmp_path / "a.log").read_text() == "a job\n"
    assert (tmp_path / "b.log").read_text() == "another\n"
    assert "WHO" not in os.environ


def test_a_job_out_of_time_is_ended_and_another_s_result_stays(tmp_path: Path) -> None:
    jobs = [
        Job(name="hangs", work=lambda: time.sleep(NEVER_S)),
        Job(name="ends", work=lambda: None),
    ]
    # Even a machine so slow that neither ends in time ends both.
    ends = {end.name: end.result for end in run_together(jobs, tmp_path, limit_s=2.0)}
    assert ends["hangs"] == "out of time"
    assert set(ends) == {"hangs", "ends"}


def test_what_a_job_leaves_behind_is_ended_with_it(tmp_path: Path) -> None:
    left = tmp_path / "left"

    def leave() -> None:
        pid = os.fork()
        if pid == 0:
            time.sleep(NEVER_S)
        left.write_text(str(pid))

    run_together([Job(name="leaves", work=leave)], tmp_path, limit_s=100.0)
    while is_running(int(left.read_text())):
        time.sleep(0.01)
