"""Measure how much of each prompt repeats the beginning of the row before, in the present order and if sorted.

The engine keeps the KV cache of what it has read, so a prompt that begins like an earlier one costs only the rest, as
long as it arrives while that cache is kept. A prefix that all prompts share (an instruction, a template's head) is
found in any order and not counted here. The sample draws beginnings of prompts, not rows: of the examined rows, it has
all rows of each drawn beginning, because otherwise a large table's small groups would be split up. In a table of more
than a million rows, prompts that begin alike but are far apart are not found.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from pipemax.wire import ServerStats
from pipemax_spark.rows.sample import SomeRows
from pipemax_spark.spark.sql import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_SAMPLED_ROWS = 1_000
_LOOKED_AT_ROWS = 1_000_000
"""Approximate number of rows to read, however long the table is."""
_BEGINNING_CHARACTERS = 64
_WORTH_IT = 0.1
_TEXT = "__pipemax_text"
_HIT_RATE = "prefix_cache_hit_rate"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixShare:
    """Shares of all characters, from 0 to 1, not counting the prefix of all prompts."""

    as_they_come: float
    sorted: float

    @property
    def advice(self) -> str | None:
        """The advice to sort the rows; None if sorting would not help much."""
        if self.sorted - self.as_they_come < _WORTH_IT:
            return None
        return (
            f"--group-by-prefix: {self.sorted:.0%} of the prompts' text would repeat the beginning of the row before "
            f"if the rows were sorted, compared with {self.as_they_come:.0%} in their present order (from a sample, "
            "beyond what all prompts have in common)"
        )


def shared_prefixes(prompts: Sequence[str]) -> PrefixShare:
    """Return the shares of these prompts, each compared with the one before it."""
    common = _common_to_all(prompts)
    rests = [prompt[common:] for prompt in prompts]
    characters = max(1, sum(map(len, prompts)))

    def share(texts: Sequence[str]) -> float:
        return sum(_common(*pair) for pair in pairwise(texts)) / characters

    return PrefixShare(as_they_come=share(rests), sorted=share(sorted(rests)))


def sample_by_beginning(rows: "DataFrame", prompt_text: "Column", *, rows_in: int) -> list[str]:
    """Return about 1,000 prompts in the order in which they come, in groups that begin alike.

    This takes two short Spark jobs.
    """
    from pyspark.sql import functions as F  # noqa: N812

    texts = rows.select(prompt_text.alias(_TEXT)).where(f"{quoted(_TEXT)} IS NOT NULL")
    head = [row[0] for row in texts.limit(_SAMPLED_ROWS).collect()]
    if min(rows_in, _LOOKED_AT_ROWS) <= len(head):
        return head
    some = SomeRows.of(texts, rows_in=rows_in, looked_at_rows=_LOOKED_AT_ROWS)
    first = _common_to_all(head) + 1
    beginning = F.xxhash64(F.substring(_TEXT, first, _BEGINNING_CHARACTERS))
    one_in = max(1, some.expected_rows // _SAMPLED_ROWS)
    drawn = some.rows.where(F.pmod(beginning, F.lit(one_in)) == 0)
    # The draw may be empty if the table has fewer beginnings than rows were to be drawn.
    return [row[0] for row in some.collect(drawn, 2 * _SAMPLED_ROWS)] or head


def hit_rate(servers: Iterable[ServerStats]) -> float | None:
    """Return the mean prefix cache hit rate over the engines that report one; None if none does.

    It is the share of prompt tokens found in the KV cache since the engine's start.
    """
    rates = [server.engine_metrics[_HIT_RATE] for server in servers if _HIT_RATE in server.engine_metrics]
    return fmean(rates) if rates else None


def _common_to_all(texts: Sequence[str]) -> int:
    return _common(min(texts), max(texts)) if texts else 0


def _common(first: str, second: str) -> int:
    """Count the characters that both texts begin with."""
    shorter = min(len(first), len(second))
    return next((i for i in range(shorter) if first[i] != second[i]), shorter)
