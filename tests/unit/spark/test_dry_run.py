"""What a dry run prints of tokens."""

from io import StringIO

import pytest
from rich.console import Console

from pipemax.wire import PreflightReply
from pipemax_spark.job.dry_run import print_dry_run
from pipemax_spark.report.terminal import Terminal


@pytest.mark.parametrize(
    ("has_images", "basis"),
    [
        (False, "(extrapolated from 2 sampled rows)"),
        (True, "(extrapolated from 2 sampled rows, without those of images)"),
    ],
)
def test_it_says_which_tokens_it_counted(basis: str, *, has_images: bool) -> None:
    printed = StringIO()
    print_dry_run(
        Terminal(Console(file=printed, width=200)),
        rows_in=100,
        rows_left=10,
        limit=None,
        reply=PreflightReply(prompt_tokens=[4, 6], output_tokens=[7, 7]),
        questions=0,
        output="out",
        has_images=has_images,
    )
    assert f"about 50 in prompts, 5.0 per row, at most 6 {basis}" in printed.getvalue()
    assert "at most 70 generated, 7 per row" in printed.getvalue()


def test_a_row_with_several_questions_counts_all_of_them() -> None:
    printed = StringIO()
    print_dry_run(
        Terminal(Console(file=printed, width=200)),
        rows_in=2,
        rows_left=2,
        limit=None,
        reply=PreflightReply(prompt_tokens=[4, 6, 5, 0], output_tokens=[7, 3, 7, 0]),
        questions=2,
        output="out",
    )
    assert "about 15 in prompts, 7.5 per row, at most 6 per question (counted over all rows)" in (
        printed.getvalue()
    )
    assert "at most 17 generated, 8 per row" in printed.getvalue()
    assert "1 of these answers would be errors" in printed.getvalue()
