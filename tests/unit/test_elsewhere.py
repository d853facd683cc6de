"""tools/test_elsewhere.sh: over seven days, each kind of machine has its day."""

import os
import shutil
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "tools" / "test_elsewhere.sh"


def _runs_of(day: int, place: Path) -> list[str]:
    """Run the script with a Python that passes every test, and return the logs that it wrote."""
    (place / "tools").mkdir(parents=True)
    shutil.copy(SCRIPT, place / "tools")
    (place / "python").symlink_to(shutil.which("true") or "/bin/true")
    command = ["bash", str(place / "tools" / SCRIPT.name), str(place), "tests"]
    subprocess.run(command, env=os.environ | {"DAY": f"{day:03}"}, check=True, capture_output=True)
    return sorted(log.name for log in (place / "logs" / "elsewhere").iterdir())


def test_each_of_seven_days_has_a_run_of_its_own(tmp_path: Path) -> None:
    days = [_runs_of(day, tmp_path / str(day)) for day in range(5, 12)]

    runs = sorted(run for day in days for run in day)
    only_root = {"another-user.log"}
    all_runs = {
        "with-AMX.log",
        "one-core.log",
        "in-Kolkata.log",
        "locale-C.log",
        "without-HOME.log",
        "busy-cores.log",
    }
    assert set(runs) - only_root == all_runs
    assert len(runs) == len(set(runs))
