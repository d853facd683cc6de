"""Show annotated rows on a page: what tells them from others, their prompts and their answers, as HTML."""

from html import escape

from pipemax_spark.report.page_parts import breakable, text_block
from pipemax_spark.report.sampled_rows import SampledAnswer, SampledRow


def row_part(row: SampledRow) -> str:
    """Return the row with its ids, its right answers, its prompt and its answers."""
    named = [*row.columns.items(), *row.truths.items()]
    head = " · ".join(
        f"<span class='soft'>{escape(name)}</span> {breakable(cut(value))}" for name, value in named
    )
    prompt = "" if row.prompt is None else text_block("prompt", row.prompt.text, left_out=row.prompt.left_out)
    answers = "".join(map(_answer, row.answers))
    pair = f"<div class='pair'>{prompt}<div>{answers}</div></div>" if prompt else answers
    return f"<div class='row'><div>{head}</div>{pair}</div>"


def _answer(answer: SampledAnswer) -> str:
    name = answer.name
    if answer.probability is not None:
        name += f", probability {answer.probability:.2f}"
    shown = ""
    if answer.answer is not None:
        shown = text_block(name, answer.answer.text, left_out=answer.answer.left_out)
    if answer.error is not None:
        code, message = answer.error
        shown += text_block(code, message[:1_000], left_out=max(0, len(message) - 1_000), is_bad=True)
    return shown


def cut(value: str) -> str:
    """Return the beginning of a value that is a line of a table."""
    return value if len(value) <= 200 else f"{value[:200]}… ({len(value) - 200:,} more characters)"
