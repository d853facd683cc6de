"""Print a dry run: rows, tokens by the model's own tokenizer, the first prompt, and what the job would do."""

from pipemax.wire import PreflightReply
from pipemax_spark.report.terminal import Terminal


def print_dry_run(
    terminal: Terminal,
    *,
    rows_in: int,
    rows_left: int,
    limit: int | None,
    reply: PreflightReply,
    questions: int,
    output: str,
    shows_prompt: bool = True,
    has_images: bool = False,
) -> None:
    """Print what the job would do if it ran now; the first sampled prompt only if ``shows_prompt``.

    With ``questions``, a row has so many requests. Nobody opens images for it, so their tokens are left out.
    """
    to_do = rows_left if limit is None else min(rows_left, limit)

    terminal.say("Output", f"{output}: {rows_in - rows_left:,} rows done earlier, {to_do:,} to do")
    if counted := reply.prompt_tokens:
        sampled = len(counted) // max(1, questions)
        mean, bad = sum(counted) / sampled, sum(count == 0 for count in counted)
        generated = sum(reply.output_tokens) / sampled
        basis = (
            "counted over all rows" if sampled == rows_in else f"extrapolated from {sampled:,} sampled rows"
        )
        basis += ", without those of images" if has_images else ""
        terminal.say(
            "Tokens",
            f"about {mean * to_do:,.0f} in prompts, {mean:,.1f} per row, at most {max(counted):,}"
            f"{' per question' if questions else ''} ({basis})",
        )
        if reply.output_tokens:
            terminal.say("", f"at most {generated * to_do:,.0f} generated, {generated:,.0f} per row")
        if bad:
            what = "answers" if questions else "rows"
            terminal.say(
                "",
                f"{bad:,} of these {what} would be errors: no prompt, one that is too long, or one that is invalid",
            )
        if shows_prompt:
            terminal.console.print("\nThe first sampled prompt, as the model would see it:\n")
            terminal.console.print(reply.first_prompt, markup=False, highlight=False, soft_wrap=True)
    terminal.console.print("\nThis was a dry run: nothing was written and no engine was started.")
