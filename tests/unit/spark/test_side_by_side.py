"""Prompts next to their answers, on a terminal and elsewhere."""

import re
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from pipemax_spark.report.side_by_side import TriedRow, print_rows
from pipemax_spark.report.terminal import Terminal


def row(number: int = 1, **changes: Any) -> TriedRow:
    values = {
        "prompt": f"prompt {number}",
        "answers": {"annotation": f"answer {number}"},
        "errors": {},
        "prompt_tokens": 1200,
        "completion_tokens": 5,
        "seconds": 0.25,
    }
    return TriedRow(number=number, **values | changes)


def printed(*rows: TriedRow, terminal_width: int | None = None) -> str:
    stream = StringIO()
    console = Console(
        file=stream, width=terminal_width or 160, force_terminal=terminal_width is not None, color_system=None
    )
    print_rows(Terminal(console), rows, seconds=1.5)
    return stream.getvalue()


@pytest.mark.parametrize("width", [60, 100])
def test_on_a_terminal_prompt_and_answer_share_a_line_of_its_width(width: int) -> None:
    lines = printed(row(1), row(2, prompt="word " * 100), terminal_width=width).splitlines()
    assert any(re.search(r"│ prompt 1 +│ answer 1 +│ 1,200 \+ │ 0\.\d │", line) for line in lines)
    assert {len(line) for line in lines if line.startswith("│")} == {width}


def test_no_control_character_of_a_row_reaches_a_terminal() -> None:
    escape = "a\x1b[2J\x9b2Jb\rc"
    text = printed(
        row(prompt=escape, answers={"annotation": escape}, errors={"annotation": ("code", escape)}),
        terminal_width=120,
    )
    assert "a\ufffd[2J\ufffd2Jb\ufffdc" in text
    assert not set("\x1b\x9b\r") & set(text)


def test_a_terminal_is_spared_the_middle_of_a_long_prompt_and_a_log_is_not() -> None:
    long = row(prompt="begin " + "x" * 3000 + " end")
    assert re.search(
        r"x+ … \(\d,\d{3} characters\) … x+ end", re.sub(r"[│\n] *", "", printed(long, terminal_width=700))
    )
    assert f"   1 prompt  {long.prompt}\n" in printed(long)


def test_elsewhere_every_line_begins_with_the_row_and_what_it_is() -> None:
    text = printed(
        row(1, prompt="one\ntwo", is_cut=True),
        row(2, prompt=None, answers={"annotation": None}, errors={"annotation": ("empty_prompt", "null")}),
        row(3, answers={"topic": "a", "tone": None}, errors={"tone": ("engine_error", "no")}),
    )
    assert [line for line in text.splitlines() if line] == [
        "   1 prompt  one",
        "   1 prompt  two",
        "   1 answer  answer 1",
        "   1 took    1,200 + 5 tokens, 0.2 s, cut at --max-tokens",
        "   2 prompt",
        "   2 error   empty_prompt: null",
        "   2 took    1,200 + 5 tokens, 0.2 s",
        "   3 prompt  prompt 3",
        "   3 topic   a",
        "   3 error   tone: engine_error: no",
        "   3 took    1,200 + 5 tokens, 0.2 s",
        "Rows     1 of 3 rows without an error, 1 empty_prompt, 1 engine_error, 1 cut at --max-tokens; "
        "3,600 tokens read, 15 generated, 1.5 s in all",
    ]
