"""Which texts end in a loop, and what the report says of outputs that ended early."""

import pytest

from pipemax_spark.report.early_ends import EarlyEnds, is_in_loop


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("So " + "I think again. " * 20, True),
        ("So " + "I think again. " * 20 + "I thi", True),
        ("a" * 100, True),
        ("and so on, " * 9, False),
        (" ".join(f"Line {n} of the poem." for n in range(60)), False),
        ("the same line of verse, sung " * 30 + "and an end", False),
        ("", False),
    ],
    ids=["whole", "cut in a pattern", "one letter", "too short", "counted", "ended", "empty"],
)
def test_a_text_is_in_a_loop_if_it_ends_with_one_pattern_over_and_over(text: str, expected: bool) -> None:
    assert is_in_loop(text) is expected


def test_the_report_has_shares_and_names_the_remedy_only_for_more_than_one_in_a_hundred() -> None:
    facts = dict(EarlyEnds(outputs=1_000, by_length=40, by_thinking=5, looping_share=0.5).facts())
    assert facts["Ended early"] == "40 (4.0%) cut at --max-tokens, 5 (0.5%) at --thinking-tokens"
    assert facts["  in a loop"].startswith(
        "about 20 of those cut repeat themselves at their end; --stop-repetition 8"
    )
    assert "  in a loop" not in dict(EarlyEnds(outputs=1_000, by_length=40, looping_share=0.25).facts())
    assert dict(EarlyEnds(outputs=1_000).facts()) == {}
