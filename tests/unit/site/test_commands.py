"""The documentation site's check of command blocks."""

from pathlib import Path

import pytest

from tools.site.commands import problems

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("make annotat", "annotat"),
        ("pipemax plan-capacity --row 5", "option --row"),
        ("pipemax plan", "command plan"),
        ("pipemax-annotate --inputs t", "option --inputs"),
        ("spark-submit --master local[2] jobs/annotate.py --inputs t", "option --inputs"),
        ("python lab/bench/nothing.py", "lab/bench/nothing.py"),
        ("python -m lab.bench.nothing --rows 5", "lab.bench.nothing"),
        ("pytest tests/unit/nothing.py::test_x", "tests/unit/nothing.py::test_x"),
    ],
)
def test_a_command_that_would_not_run_is_named(command: str, missing: str) -> None:
    for block in (f"Run\n\n    {command}\n", f"```bash\n{command}\n```\n"):
        assert list(problems(block, ROOT)) == [f"{command!r}: there is no {missing}"]


def test_commands_that_exist_are_accepted_also_over_several_lines() -> None:
    block = "Run\n\n    pipemax-annotate --input t \\\n        --output u --dry-run   # counts only\n    make test\n"
    assert not list(problems(block, ROOT))


def test_output_and_python_code_are_not_taken_for_commands() -> None:
    assert not list(problems("```python\nmake = annotat\n```\n", ROOT))
