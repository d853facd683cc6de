"""The proof on one GPU says for each part whether it passed, failed, was ended, was left out or could not run."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lab.gpu.machine import Machine, is_installed
from lab.gpu.models import make_check_engine
from lab.gpu.part_process import PartProcess
from lab.gpu.parts import GROUPS, PARTS, Part, Places, chosen_parts
from lab.gpu.proof import exit_status, prove
from lab.gpu.summary import PartEnd, last_line, overview
from lab.tests.processes import is_running
from pipemax.config import EngineConfig

SCRIPT = Path(__file__).parents[2] / "tools" / "gpu_proof.sh"
H100 = Machine(gpu="an H100", gigabytes=85.0)


def part(name: str, expected_s: float = 10.0, *, gigabytes: float = 1.0, modules: Sequence[str] = ()) -> Part:
    return Part(
        name=name,
        expected_s=expected_s,
        gigabytes=gigabytes,
        modules=tuple(modules),
        arguments=lambda places, left_s: ["-c", "pass"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fake:
    """What becomes of a fake part: it hangs if it takes longer than its limit."""

    takes_s: float
    status: int = 0
    prints: str = ""


@dataclass
class FakeRun:
    """Implements ``RunPart`` on a clock of its own."""

    fakes: dict[str, Fake]
    now_s: float = 1000.0
    limits_s: dict[str, float] = field(default_factory=dict)

    def __call__(self, part: Part, limit_s: float) -> int | None:
        fake = self.fakes[part.name]
        self.limits_s[part.name] = limit_s
        self.now_s += min(fake.takes_s, limit_s)
        return fake.status if fake.takes_s <= limit_s else None

    def output(self, part: Part) -> str:
        return self.fakes[part.name].prints


def run(
    fakes: dict[str, Fake], parts: Sequence[Part], *, seconds: float = 100.0, machine: Machine = H100
) -> tuple[list[PartEnd], str, FakeRun]:
    """The ends of the parts, the summary, and the fake."""
    fake, told = FakeRun(fakes), []
    ends = prove(parts, fake, machine=machine, seconds=seconds, now_s=lambda: fake.now_s, tell=told.append)
    return ends, "".join(told), fake


def test_a_part_that_does_not_fit_into_what_is_left_is_left_out_and_a_shorter_one_still_runs() -> None:
    fakes = {"a": Fake(takes_s=60), "c": Fake(takes_s=30)}
    ends, summary, fake = run(fakes, [part("a", 50), part("b", 41), part("c", 40)])
    assert [end.result for end in ends] == ["passed", "left out", "passed"]
    assert "## b: left out\n\ntakes about 41 s, and 40 s are left" in summary
    assert fake.limits_s == {"a": 100.0, "c": 40.0}
    assert exit_status(ends) == 0


def test_a_part_that_hangs_is_ended_with_the_clock_and_its_tables_stay() -> None:
    printed = "## rates\n\n| x |\n| --- |\n| 7 |\nbegins the second table\n"
    hangs = Fake(takes_s=1e9, prints=printed)
    ends, summary, fake = run({"a": hangs}, [part("a"), part("b")])
    assert [(end.result, end.seconds) for end in ends] == [("ended", 100.0), ("left out", None)]
    assert fake.now_s == 1100.0
    assert "## a: ended, 100 s\n\nbegins the second table\n\n### rates\n\n| x |\n| --- |\n| 7 |\n" in summary
    assert exit_status(ends) == 1


def test_a_part_that_fails_fails_the_proof_and_the_next_one_still_runs() -> None:
    fakes = {"a": Fake(takes_s=1, status=2, prints="1 failed | 9 passed\n"), "b": Fake(takes_s=1)}
    ends, _, _ = run(fakes, [part("a"), part("b")])
    assert [end.result for end in ends] == ["failed", "passed"]
    assert exit_status(ends) == 1
    assert "| a | **failed** | 1 s | 1 failed / 9 passed |" in overview(ends)


def test_what_a_part_needs_and_the_machine_lacks_is_named() -> None:
    machine = Machine(gpu="a GPU", gigabytes=36.0, missing=frozenset({"vllm"}))
    parts = [part("a", gigabytes=40), part("b", modules=["torch", "vllm"]), part("c", expected_s=1e9)]
    ends, _, _ = run({}, parts, machine=machine)
    assert [(end.result, end.note) for end in ends[:2]] == [
        ("skipped", "the GPU has 36 GB, 40 are needed"),
        ("skipped", "not installed: vllm"),
    ]
    assert ends[2].result == "left out"
    assert exit_status(ends) == 3


def test_each_part_is_in_the_summary_before_the_next_one_begins() -> None:
    told: list[str] = []
    fake = FakeRun({"a": Fake(takes_s=1, prints="well\n"), "b": Fake(takes_s=1)})

    class Looks(FakeRun):
        def __call__(self, part: Part, limit_s: float) -> int | None:
            seen.append(len(told))
            return super().__call__(part, limit_s)

    seen: list[int] = []
    looks = Looks(fake.fakes)
    prove(
        [part("a"), part("b")],
        looks,
        machine=H100,
        seconds=100,
        now_s=lambda: looks.now_s,
        tell=told.append,
    )
    assert seen == [0, 1]
    assert "well" in told[0]


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_fits_into_its_limit(group: str) -> None:
    assert sum(each.expected_s for each in chosen_parts([group])) <= 420


def test_parts_and_groups_can_be_named_and_each_runs_once() -> None:
    names = [each.name for each in chosen_parts(["link", "correct"])]
    assert names == ["link", "tests", "parity", "check-node"]
    with pytest.raises(ValueError, match="unknown part kernels"):
        chosen_parts(["kernels"])


def test_the_line_that_a_part_is_known_by_is_its_note() -> None:
    output = "verdict      passed: well\ncalibration  kept\n| a table |\n"
    assert last_line(output, "verdict") == "verdict      passed: well"
    assert last_line(output) == "calibration  kept"
    assert last_line("Traceback\nValueError: no\n", "verdict") == "ValueError: no"


# -- real processes ------------------------------------------------------------------------------------------------


def python_part(name: str, code: str) -> Part:
    return Part(
        name=name, expected_s=1.0, gigabytes=0.0, modules=(), arguments=lambda places, left_s: ["-c", code]
    )


def test_a_part_s_process_is_ended_at_the_limit_with_all_that_it_started(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1e6)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(1e6)\n"
    )
    log = tmp_path / "hangs.log"
    # The limit is over once the child runs, however long that takes.
    parts = PartProcess(
        Places(out=tmp_path, scratch=tmp_path),
        now_s=lambda: 1e9 if log.exists() and log.read_text().endswith("\n") else 0.0,
    )
    hangs = python_part("hangs", code)
    assert parts(hangs, 100.0) is None
    child = int(parts.output(hangs))
    while is_running(child):
        time.sleep(0.01)


def test_a_part_s_status_and_output_are_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    code = (
        "import os; print(os.environ['OMP_NUM_THREADS'], os.environ['XDG_CACHE_HOME']); raise SystemExit(3)"
    )
    parts = PartProcess(Places(out=tmp_path, scratch=tmp_path / "scratch"))
    fails = python_part("fails", code)
    assert parts(fails, 100.0) == 3
    assert parts.output(fails) == f"7 {tmp_path / 'scratch' / 'cache'}\n"
    assert parts.output(fails) in capfd.readouterr().out


def prove_by_script(*arguments: str) -> tuple[int, str]:
    """The exit status and all output, on a machine where no GPU is visible."""
    command = ["bash", str(SCRIPT), "--python", sys.executable, *arguments]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_without_a_gpu_every_part_is_skipped_with_a_reason(tmp_path: Path) -> None:
    status, output = prove_by_script("--out", str(tmp_path), *PARTS)
    assert status == 3, output
    for name in PARTS:
        assert f"## {name}: skipped" in output
    assert "finds no CUDA GPU" in output
    assert (tmp_path / "summary.md").read_text() in output


@pytest.mark.parametrize("arguments", [["kernels"], [], ["--second", "x", "tests"]])
def test_wrong_arguments_are_refused(tmp_path: Path, arguments: list[str]) -> None:
    status, output = prove_by_script("--out", str(tmp_path), *arguments)
    assert status == 2, output


def test_modules_are_looked_for_by_their_whole_name() -> None:
    assert is_installed("json.decoder")
    assert not is_installed("json.nothing")
    assert not is_installed("nowhere.at_all")


def test_the_check_s_engine_config_is_valid_and_its_model_has_a_tokenizer(tmp_path: Path) -> None:
    config = EngineConfig.load(make_check_engine(tmp_path))
    assert config.policy == "pipemax"
    files = {path.name for path in Path(config.model).iterdir()}
    assert files == {"config.json", "tokenizer.json", "tokenizer_config.json"}
