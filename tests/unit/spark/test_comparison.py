"""What a comparison of two prompts prints, for rows with questions, errors and texts that a terminal would obey."""

from io import StringIO

import pytest
from rich.console import Console

from pipemax_spark.report.comparison import Comparison, print_comparison
from pipemax_spark.report.comparison_page import comparison_page
from pipemax_spark.report.side_by_side import Answered, TriedRow
from pipemax_spark.report.terminal import Terminal

SCRIPT = "<script>alert(1)</script>"


def tried(number: int, topic: str | None, tone: str | None, *, seconds: float = 2.0) -> TriedRow:
    """A row with two questions; the right topic is 'bug', and None is a question with an error."""
    answers = {"topic": topic, "tone": tone}
    return TriedRow(
        number=number,
        prompt=f"{SCRIPT} {number}",
        answers=answers,
        errors={name: ("engine_error", "it failed") for name, text in answers.items() if text is None},
        prompt_tokens=10,
        completion_tokens=4,
        seconds=seconds,
        ids={"id": f"r{number}\x1b[2J"},
        truths={} if number == 4 else {"topic": ("bug", topic == "bug")},
    )


COMPARISON = Comparison(
    templates=("A {x}", "B {x}"),
    answered=(
        Answered(
            [
                tried(1, "bug", "calm"),
                tried(2, "bug", SCRIPT),
                tried(3, "bug", "calm"),
                tried(4, "bug", "calm"),
            ]
        ),
        Answered(
            [
                tried(n, *of, seconds=4.0)
                for n, of in enumerate(
                    (("bug", "calm"), ("praise", "calm"), (None, "calm"), ("praise", "calm")), 1
                )
            ]
        ),
    ),
    rows_in=7_200,
    golds={"topic": "label"},
    price_per_hour=10.0,
)


def printed(*, is_terminal: bool, shows_rows: bool = True) -> str:
    stream = StringIO()
    console = Console(file=stream, width=120, force_terminal=is_terminal, color_system=None)
    print_comparison(Terminal(console), COMPARISON, shows_rows=shows_rows)
    return stream.getvalue()


def test_the_facts_say_what_differs_which_is_right_and_what_each_costs() -> None:
    facts = COMPARISON.facts()
    text = str(COMPARISON)
    assert [one.number for one, _ in COMPARISON.differing] == [2, 3, 4]
    assert "Same answers       33.3% (95 %: 6.1% to 79.2%): 1 of 3 rows that both have answered" in text
    assert "Accuracy of A      topic: 100.0% (95 %: 43.9% to 100.0%): 3 of 3 rows, by column 'label'" in text
    assert "Accuracy of B      topic: 33.3%" in text
    assert (
        "Only one is right  topic: A in 2 rows, B in 0; equally good prompts differ so much with p = 0.5 "
        in text
    )
    # 4 rows in 2 s, and in 4 s.
    assert dict(facts)["Cost of A"] == (
        "10.0 tokens read and 4.0 generated per row, 0.500 s; 7,200 rows: 72,000 and 28,800 tokens, 60 min, cost 10.00"
    )
    assert dict(facts)["Cost of B"].endswith(
        ", 1.000 s; 7,200 rows: 72,000 and 28,800 tokens, 2 h 00 min, cost 20.00; 1 row with an error"
    )


@pytest.mark.parametrize("is_terminal", [True, False])
def test_rows_that_differ_stand_side_by_side_or_line_by_line_and_no_text_is_obeyed(is_terminal: bool) -> None:
    text = printed(is_terminal=is_terminal)
    assert "\x1b" not in text
    for part in ("topic: bug", "topic: praise", "tone: calm", "topic: engine_error: it failed"):
        assert part in text
    assert ("answer A" in text) is is_terminal
    assert "r1" not in text, "its answers are the same"
    assert "topic: praise" not in printed(is_terminal=is_terminal, shows_rows=False)


def test_the_page_escapes_what_rows_say_and_leaves_rows_out_where_none_may_be_shown() -> None:
    page = comparison_page(COMPARISON, input_name=SCRIPT, shows_rows=True)
    assert "<script" not in page
    assert page.count("prompt B") == 3
    assert "answer A, right" in page
    assert "answer B, wrong" in page
    assert "prompt" not in comparison_page(COMPARISON, input_name="t", shows_rows=False).partition("<body>")[
        2
    ].replace("Two prompts", "").replace("good prompts", "")
