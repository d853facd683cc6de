"""Print a dry run: rows, tokens by the model's own tokenizer, the first prompt, and what the job would do."""

from pipemax.wire import PreflightReply
from pipemax_spark.options import JobOptions
from pipemax_spark.report.terminal import Terminal


def print_dry_run(
    terminal: Terminal,
    options: JobOptions,
    reply: PreflightReply,
    *,
    rows_in: int,
    to_do: int,
    has_images: bool = False,
) -> None:
    """Print what the job would read and generate if it ran now, and the first sampled prompt if that may be shown.

    With questions, a row has so many requests. Nobody opens images for it, so their tokens are left out.
    """
    questions = len(options.ask)
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
        if not options.no_sample:
            terminal.console.print("\nThe first sampled prompt, as the model would see it:\n")
            terminal.console.print(reply.first_prompt, markup=False, highlight=False, soft_wrap=True)
    terminal.console.print("\nThis was a dry run: nothing was written and no engine was started.")
