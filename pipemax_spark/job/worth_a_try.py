"""Find what would let the prefix cache serve more of the prompts: of the template, and of the order of the rows.

Nothing is changed by itself. Another template is another prompt, so its worth for the answers is the user's to judge.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from pipemax.wire import PreflightReply
from pipemax_spark.options import JobOptions
from pipemax_spark.request.columns import prompt_text
from pipemax_spark.request.value_text import ZONE_SETTING
from pipemax_spark.rows.checked import Checked
from pipemax_spark.rows.field_counts import count_fields, template_fields
from pipemax_spark.rows.prefix import row_order, sample_by_beginning
from pipemax_spark.rows.prompt_order import Finding, TemplateOrder
from pipemax_spark.rows.prompt_sizes import CountedTokens, PromptSizes, sizes_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def worth_a_try(
    options: JobOptions, checked: Checked, rows: "DataFrame", rows_in: int, *, of_template: bool
) -> list[Finding]:
    """Return the changes that are worth a try, those that cost least first. ``rows_in`` is the number of ``rows``.

    With ``of_template``, the template is examined too, in one more pass over at most a million rows.
    """
    # In the order that the user wants, the rows' neighbours are not for prompts to choose.
    if options.order_by is not None or not _has_text_first(options, checked.reply, rows):
        return []
    requests = options.request_columns.add(rows)
    prompts = sample_by_beginning(requests, prompt_text(requests), rows_in=rows_in)
    if not prompts.texts:
        return []
    sizes = sizes_of(
        prompts.texts,
        _counted(checked.reply),
        questions=[question.template for question in options.ask],
        system=options.generation.system,
    )
    today = row_order(prompts, sizes, is_sorted=options.group_by_prefix, reuses=_reuses(options))
    of_fields: list[Finding | None] = []
    template = _template_order(options, sizes, rows, rows_in) if of_template else None
    if template is not None:
        seen = template.row_order(is_sorted=options.group_by_prefix)
        today = replace(
            today,
            as_they_come=max(today.as_they_come, seen.as_they_come),
            sorted=max(today.sorted, seen.sorted),
        )
        of_fields = [template.instructions_first(today), template.fields_in_order(today)]
    return [finding for finding in (*of_fields, today.finding()) if finding is not None]


def _has_text_first(options: JobOptions, reply: PreflightReply, rows: "DataFrame") -> bool:
    """Tell whether the engine keeps prefixes, and prompts begin with their text. Images come before it."""
    return (
        options.generation.task == "generate"
        and reply.engine.get("enable_prefix_caching", True)
        and not options.source.has_images(rows.schema)
    )


def _counted(reply: PreflightReply) -> CountedTokens:
    return CountedTokens(
        of_prompts=[tokens for tokens in reply.prompt_tokens if tokens],
        shared=reply.shared_prefix_tokens,
        block_tokens=reply.engine.get("block_size"),
    )


def _reuses(options: JobOptions) -> bool:
    """Tell whether equal requests are computed once."""
    is_repeatable = all(one.temperature == 0 or one.seed is not None for one in options.generations)
    return is_repeatable and not options.compute_each


def _template_order(
    options: JobOptions, sizes: PromptSizes, rows: "DataFrame", rows_in: int
) -> TemplateOrder | None:
    template = options.source.template
    if template is None:
        return None
    zone = str(rows.sparkSession.conf.get(ZONE_SETTING))
    counts = count_fields(rows, template, zone, rows_in=rows_in, reuses=_reuses(options))
    if counts is None:
        return None
    head, fields = template_fields(template, rows.schema)
    return TemplateOrder(head=head, fields=fields, counts=counts, sizes=sizes)
