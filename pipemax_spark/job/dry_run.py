"""Print a dry run: rows, tokens by the model's own tokenizer, the first prompt, and what the job would do."""

from pipemax.wire import PreflightReply
from pipemax_spark.monitor.terminal import Terminal


def print_dry_run(
    terminal: Terminal,
    *,
    rows_in: int,
    rows_left: int,
    limit: int | None,
    reply: PreflightReply,
    max_tokens: int,
    output: str,
    shows_prompt: bool = True,
    has_images: bool = False,
) -> None:
    """Print what the job would do if it ran now; the first sampled prompt only if ``shows_prompt``.

    Nobody opens images for it, so their tokens are left out.
    """
    to_do = rows_left if limit is None else min(rows_left, limit)

    terminal.say("Output", f"{output}: {rows_in - rows_left:,} rows done earlier, {to_do:,} to do")
    if counted := reply.prompt_tokens:
        mean, too_long = sum(counted) / len(counted), sum(count == 0 for count in counted)
        basis = (
            "counted over all rows"
            if len(counted) == rows_in
            else f"extrapolated from {len(counted):,} sampled rows"
        )
        basis += ", without those of images" if has_images else ""
        terminal.say(
            "Tokens",
            f"about {mean * to_do:,.0f} in prompts, {mean:,.1f} per row, at most {max(counted):,} ({basis})",
        )
        terminal.say("", f"at most {max_tokens * to_do:,} generated, {max_tokens:,} per row")
        if too_long:
            terminal.say(
                "", f"{too_long:,} of these rows would be error rows: no prompt, or one that is too long"
            )
        if shows_prompt:
            terminal.console.print("\nThe first sampled prompt, as the model would see it:\n")
            terminal.console.print(reply.first_prompt, markup=False, highlight=False, soft_wrap=True)
    terminal.console.print("\nThis was a dry run: nothing was written and no engine was started.")
