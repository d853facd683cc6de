"""What a dry run prints of tokens."""

from io import StringIO

import pytest
from rich.console import Console

from pipemax.wire import PreflightReply
from pipemax_spark.job.dry_run import print_dry_run
from pipemax_spark.monitor.terminal import Terminal


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
        reply=PreflightReply(prompt_tokens=[4, 6]),
        max_tokens=7,
        output="out",
        has_images=has_images,
    )
    assert f"about 50 in prompts, 5.0 per row, at most 6 {basis}" in printed.getvalue()
    assert "at most 70 generated, 7 per row" in printed.getvalue()
