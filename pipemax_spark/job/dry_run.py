"""``--dry-run``: rows, tokens by the model's tokenizer, hours by an earlier run's record, what the cache could save.

An interval at 95 % says how far chance may be off: which rows were sampled, and how the speed of the earlier run
varied. It does not know of rows that differ from the sampled ones, or of other machines.
"""

from collections.abc import Sequence

from pipemax.wire import PreflightReply
from pipemax_spark.job.fit import check_rows_fit
from pipemax_spark.job.job import JobCall
from pipemax_spark.job.limits import RunLimits
from pipemax_spark.job.replacing import say_replaced
from pipemax_spark.job.reuse import Reuse
from pipemax_spark.job.worth_a_try import worth_a_try
from pipemax_spark.report.findings import runs_of_spec
from pipemax_spark.report.page_parts import duration
from pipemax_spark.report.run_speed import RunSpeed, rate_factor, ratio_interval, speed_of_run
from pipemax_spark.report.summary import counted
from pipemax_spark.report.terminal import Terminal
from pipemax_spark.rows.annotated import holds_annotations
from pipemax_spark.rows.checked import Checked
from pipemax_spark.rows.incremental import Batch
from pipemax_spark.rows.prompt_order import Finding
from pipemax_spark.rows.remaining import Remaining
from pipemax_spark.spark.sql import quoted

_LOOKED_AT_RUNS = 20


def dry_run(call: JobCall, checked: Checked, limits: RunLimits) -> None:
    """Print what the job would do if it ran now, and the first sampled prompt if that may be shown."""
    remaining, options, terminal = Remaining(call.table, call.options, checked), call.options, call.terminal
    done = remaining.done_if_any()
    left = remaining.left(Batch(rows=checked.source.rows), done)
    if call.table.exists():
        check_rows_fit(call.table, left.select(*map(quoted, checked.schema.names)))
    if done is not None:
        say_replaced(call, remaining, left)
    rows_left, limit = left.count(), options.limit
    done_earlier = checked.rows_in - rows_left
    if rows_left and (reuse := Reuse.of(call, checked)) is not None:
        reused = reuse.count(left)
        rows_left -= reused.rows
        terminal.say(
            "Reuse", f"{reused.rows:,} rows would take answers of {options.reuse} ({reused.tokens:,} tokens)"
        )
    to_do = rows_left if limit is None else min(rows_left, limit)
    terminal.say("Output", f"{call.table.name}: {done_earlier:,} rows done earlier, {to_do:,} to do")
    if checked.reply.prompt_tokens:
        has_images = options.source.has_images(checked.source.rows.schema)
        _say_tokens(call, checked, to_do, "without those of images" if has_images else "")
    if to_do:
        speed = known_speed(call, checked)
        _say_time(terminal, speed, to_do, options.price_per_hour)
        limits.expect(to_do)
        limits.say_forecast(terminal, speed, checked.reply)
        findings = worth_a_try(options, checked, checked.source.rows, checked.rows_in, of_template=True)
        for label, finding in zip(("Cache", *[""] * len(findings)), findings, strict=False):
            terminal.say(label, f"{finding}{_gain(finding, speed, to_do)}")
    if checked.reply.prompt_tokens and not options.no_sample:
        seen = "it would be sent" if checked.reply.token_note else "the model would see it"
        terminal.console.print(f"\nThe first sampled prompt, as {seen}:\n")
        terminal.console.print(checked.reply.first_prompt, markup=False, highlight=False, soft_wrap=True)
    terminal.console.print("\nThis was a dry run: nothing was written and no engine was started.")


def _say_tokens(call: JobCall, checked: Checked, to_do: int, note: str) -> None:
    """Print the tokens to read and to generate. With questions, a row has so many requests."""
    reply, questions = checked.reply, len(call.options.ask)
    by_row = _sums(reply, max(1, questions))
    mean, bad = sum(by_row) / len(by_row), sum(count == 0 for count in reply.prompt_tokens)
    is_whole = len(by_row) == checked.rows_in
    basis = ["counted over all rows" if is_whole else f"extrapolated from {len(by_row):,} sampled rows"]
    if not is_whole:
        low, high = ratio_interval([(float(tokens), 1.0) for tokens in by_row])
        basis.append(f"95 %: {low * to_do:,.0f} to {high * to_do:,.0f}")
    basis += [one for one in (reply.token_note, note) if one]
    call.terminal.say(
        "Tokens",
        f"about {mean * to_do:,.0f} in prompts, {mean:,.1f} per row, at most {max(reply.prompt_tokens):,}"
        f"{' per question' if questions else ''} ({', '.join(basis)})",
    )
    if reply.output_tokens:
        generated = sum(reply.output_tokens) / len(by_row)
        call.terminal.say("", f"at most {generated * to_do:,.0f} generated, {generated:,.0f} per row")
    prices = call.options.prices
    if prices.has_tokens:
        of_prompts = prices.of_tokens(mean * to_do, 0)
        longest = prices.of_tokens(mean * to_do, sum(reply.output_tokens) / len(by_row) * to_do)
        call.terminal.say(
            "Cost", f"of tokens, {of_prompts:,.2f} to {longest:,.2f}, by how long the answers are"
        )
    if bad:
        what = "answers" if questions else "rows"
        call.terminal.say(
            "",
            f"{bad:,} of these {what} would be errors: no prompt, one that is too long, or one that is invalid",
        )


def _sums(reply: PreflightReply, questions: int) -> Sequence[int]:
    """Return the prompt tokens of each sampled row: the requests of a row follow one another."""
    counted = reply.prompt_tokens
    return [sum(counted[first : first + questions]) for first in range(0, len(counted), questions)]


def known_speed(call: JobCall, checked: Checked) -> RunSpeed | None:
    """Return the speed of the latest run of this job that kept its engines full, or else of the latest; None without.

    A run's record is on the driver that ran it.
    """
    if not call.table.exists() or not holds_annotations(call.table.read().schema):
        return None
    requests = max(1, len(call.options.ask))
    speeds = [
        speed
        for run_id in runs_of_spec(call.table, checked.spec.hash)[:_LOOKED_AT_RUNS]
        if (speed := speed_of_run(call.directory.parent, run_id, requests_per_row=requests)) is not None
    ]
    return next((speed for speed in speeds if speed.interval is not None), speeds[0] if speeds else None)


def _say_time(terminal: Terminal, speed: RunSpeed | None, to_do: int, price_per_hour: float | None) -> None:
    if speed is None:
        terminal.say(
            "Time",
            "no estimate: this driver has no record of an earlier run of this job. Run it with --limit, for rows that "
            "take a few minutes, and then --dry-run again",
        )
        return

    def priced(seconds: float) -> str:
        cost = "" if price_per_hour is None else f", cost {seconds / 3600 * price_per_hour:,.2f}"
        return f"{duration(seconds)}{cost}"

    engines = f"{counted(speed.engines, 'engine')} as in run {speed.run_id}"
    seconds = to_do / speed.rows_per_s
    if speed.interval is None:
        terminal.say(
            "Time",
            f"at most {priced(seconds)} on {engines}, which were full for {speed.full_s:.0f} s only: full engines are "
            "faster, how much is unknown. Without their start",
        )
        return
    low, high = (to_do / rows_per_s for rows_per_s in reversed(speed.interval))
    terminal.say(
        "Time",
        f"about {priced(seconds)} (95 %: {priced(low)} to {priced(high)}) on {engines}, without their start and for "
        "rows like those of that run",
    )


def _gain(finding: Finding, speed: RunSpeed | None, to_do: int) -> str:
    """Return what a finding means for the time, as far as the run says that had this speed."""
    if speed is None or speed.prefill_share is None:
        return ""
    factor = rate_factor(finding, speed.prefill_share)
    if factor is None:
        decode = 100 * (1 - speed.prefill_share)
        return f", no gain in rows/s: decode took {decode:.0f} % of the engines' time in run {speed.run_id}"
    saved_s = to_do / speed.rows_per_s * (1 - 1 / factor)
    return f", about {factor:.1f} times the rows/s, {duration(saved_s)} less"
