"""Measure how much of each prompt repeats the beginning of an earlier one, in the present order and if sorted.

The engine keeps the KV cache of what it has read, so a prompt that begins like an earlier one costs only the rest, as
long as it arrives while that cache is kept. The sample draws beginnings of prompts, not rows: of the examined rows, it
has all rows of each drawn beginning, because otherwise a large table's small groups would be split up. In a table of
more than a million rows, prompts that begin alike but are far apart are not found.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from pipemax.wire import ServerStats
from pipemax_spark.rows.prompt_order import RowOrder
from pipemax_spark.rows.prompt_sizes import PromptSizes, common, common_to_all
from pipemax_spark.rows.sample import SomeRows
from pipemax_spark.spark.sql import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_SAMPLED_ROWS = 1_000
LOOKED_AT_ROWS = 1_000_000
"""Approximate number of rows to read, however long the table is."""
_BEGINNING_CHARACTERS = 64
_TEXT = "__pipemax_text"
_HIT_RATE = "prefix_cache_hit_rate"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledPrompts:
    """Prompts in the order in which they come, in groups that begin alike."""

    texts: Sequence[str]
    one_in: int = 1
    """Of the examined rows, about one in so many was drawn."""


def row_order(prompts: SampledPrompts, sizes: PromptSizes, *, is_sorted: bool, reuses: bool) -> RowOrder:
    """Return the shares of these prompts, at least one, that earlier ones have left in the cache.

    With ``reuses``, equal prompts are computed once.
    """
    texts = list(dict.fromkeys(prompts.texts)) if reuses else prompts.texts

    def share(texts: Sequence[str], kept_rows: int) -> float:
        return sizes.share(sum(map(sizes.in_cache, _repeated(texts, kept_rows))) / len(texts))

    return RowOrder(
        as_they_come=share(texts, max(1, int(sizes.kept_rows / prompts.one_in))),
        sorted=share(sorted(texts), 1),
        is_sorted=is_sorted,
    )


def _repeated(texts: Sequence[str], kept_rows: int) -> Iterable[int]:
    """Yield, for each text but the first, how many of its first characters are those of one of the last texts."""
    kept: list[str] = []
    for number, text in enumerate(texts):
        place = bisect_left(kept, text)
        if kept:
            yield max(common(text, near) for near in kept[max(0, place - 1) : place + 1])
        insort(kept, text)
        if number >= kept_rows:
            del kept[bisect_left(kept, texts[number - kept_rows])]


def sample_by_beginning(rows: "DataFrame", prompt_text: "Column", *, rows_in: int) -> SampledPrompts:
    """Return about 1,000 prompts.

    This takes two short Spark jobs.
    """
    from pyspark.sql import functions as F  # noqa: N812

    texts = rows.select(prompt_text.alias(_TEXT)).where(f"{quoted(_TEXT)} IS NOT NULL")
    head = [row[0] for row in texts.limit(_SAMPLED_ROWS).collect()]
    if min(rows_in, LOOKED_AT_ROWS) <= len(head):
        return SampledPrompts(texts=head)
    some = SomeRows.of(texts, rows_in=rows_in, looked_at_rows=LOOKED_AT_ROWS)
    first = common_to_all(head) + 1
    beginning = F.xxhash64(F.substring(_TEXT, first, _BEGINNING_CHARACTERS))
    one_in = max(1, some.expected_rows // _SAMPLED_ROWS)
    drawn = some.rows.where(F.pmod(beginning, F.lit(one_in)) == 0)
    if sampled := [row[0] for row in some.collect(drawn, 2 * _SAMPLED_ROWS)]:
        return SampledPrompts(texts=sampled, one_in=one_in)
    return SampledPrompts(texts=head)  # the table has fewer beginnings than rows were to be drawn


def hit_rate(servers: Iterable[ServerStats]) -> float | None:
    """Return the mean prefix cache hit rate over the engines that report one; None if none does.

    It is the share of prompt tokens found in the KV cache since the engine's start.
    """
    rates = [server.engine_metrics[_HIT_RATE] for server in servers if _HIT_RATE in server.engine_metrics]
    return fmean(rates) if rates else None
