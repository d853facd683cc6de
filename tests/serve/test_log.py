"""The server's log stays within its bounds, whatever the engine and its processes write."""

from collections.abc import Callable

from pipemax.node.repeated_lines import MAX_LINES
from tests.serve.support import files_of, options, run_prompts
from tests.waiting import wait_until

EnginePython = Callable[..., str]


def test_a_line_that_the_engine_logs_ten_thousand_times_is_written_a_few_times(
    fake_engine_python: EnginePython,
) -> None:
    opts = options(fake_engine_python())
    run_prompts(["[[log 10000]]", "hello"], opts)
    log = files_of(opts).log.read_text()
    assert log.count("the fake logs line") == MAX_LINES
    assert "further lines from this place are left out" in log


def test_what_a_process_of_the_engine_prints_does_not_fill_the_disk(fake_engine_python: EnginePython) -> None:
    opts = options(fake_engine_python("--log-bytes=20000", "--log-look-s=0.05"))
    run_prompts(["[[print 20000]]", "hello"], opts)
    log = files_of(opts).log
    older = log.with_name(f"{log.name}.1")
    wait_until(lambda: log.stat().st_size <= 20_000, what="the log is within its bounds")
    assert older.stat().st_size <= 2 * 20_000, "and what came while it was copied"
    run_prompts(["[[print 1]]"], opts)
    assert "\nprinted 0\n" in log.read_text(), "the server's and its processes' output goes on"
