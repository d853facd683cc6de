"""How much of its prompts an engine would find in its prefix cache, with template and rows in this or another order.

With one template for all rows, a prompt repeats an earlier one up to the first column whose value differs, so what
repeats depends only on the sets of columns that come first: on how many different combinations of values each has. The
idea to reorder rows and fields is that of GGR (arXiv:2403.05821), which orders the fields of each row apart. Values
that only begin alike are not seen here (``prefix`` sees them, in the present order).

The cache is assumed to hold the last ``KEPT_TOKENS`` of the prompts and nothing else: real engines mostly hold more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, permutations

from pipemax_spark.rows.prompt_sizes import PromptSizes

MAX_ORDERED_FIELDS = 6
"""Up to so many columns, all orders are compared."""
WORTH_IT = 0.1
"""Share of the prompts' tokens from which on a change is worth the trouble."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A place of the template that names a column."""

    name: str
    text_behind: str = ""
    """The template's text behind it, up to the next column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldCounts:
    """What was counted over many rows, none of which has a null in a column of the template."""

    rows: int
    """The rows that are computed: without those of which an equal one is."""
    combinations: Mapping[frozenset[str], int]
    """Columns → the number of different combinations of their values; of all sets, or of those that come first."""
    characters: Mapping[str, float]
    """Column → the mean length of its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A change that is worth a try."""

    change: str
    now: float
    """The share of the prompts' tokens that come from the cache today, from 0 to 1."""
    then: float

    def __str__(self) -> str:
        return (
            f"{self.change}: {100 * self.then:.0f} % of prompt tokens from the cache instead of "
            f"{100 * self.now:.0f} %"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOrder:
    """The shares of the prompts' tokens that come from the cache, from 0 to 1."""

    as_they_come: float
    sorted: float
    is_sorted: bool = False
    """Whether the job sorts its rows."""

    @property
    def now(self) -> float:
        return self.sorted if self.is_sorted else self.as_they_come

    def finding(self) -> Finding | None:
        """Return what sorting the rows by prompt is worth; None if little."""
        return worthwhile("--group-by-prefix", self.now, self.sorted)


def worthwhile(change: str, now: float, then: float, *, rival: float = 0.0) -> Finding | None:
    """Return the finding, or None if its share is not clearly above today's and that of a rival."""
    enough = then - max(now, rival) >= WORTH_IT
    return Finding(change=change, now=now, then=min(1.0, then)) if enough else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOrder:
    """A template's fields, and what was counted of the columns that they name."""

    head: str
    """The template's text before its first column."""
    fields: tuple[Field, ...]
    counts: FieldCounts
    sizes: PromptSizes

    def row_order(self, *, is_sorted: bool) -> RowOrder:
        """Return the shares of the template as it is."""
        return RowOrder(
            as_they_come=self._share(self.fields, is_sorted=False),
            sorted=self._share(self.fields, is_sorted=True),
            is_sorted=is_sorted,
        )

    def instructions_first(self, today: RowOrder) -> Finding | None:
        """Return what it is worth to put text that stands behind columns before all of them; None if little.

        Text shorter than a block of the cache is a label of its column and stays there.
        """
        moved = [field for field in self.fields if self.sizes.fills_a_block(field.text_behind)]
        text = "".join(field.text_behind for field in moved)
        rest = tuple(replace(field, text_behind="") if field in moved else field for field in self.fields)
        shares = [
            order._share(order.fields, is_sorted=today.is_sorted)
            for order in (self, replace(self, head=self.head + text, fields=rest))
        ]
        tokens, all_tokens = self.sizes.tokens(len(text)), self.sizes.prompt_tokens
        names = dict.fromkeys(f"{{{field.name}}}" for field in moved)
        return worthwhile(
            f"{tokens:.0f} of {all_tokens:.0f} prompt tokens are text behind {' and '.join(names)}; put it first, and "
            "all rows share it",
            today.now,
            today.now + shares[1] - shares[0],
        )

    def fields_in_order(self, today: RowOrder) -> Finding | None:
        """Return what another order of the fields is worth, with the rows sorted where that is needed; None if little.

        Reordering changes the prompts, so it is only offered if it saves more than sorting the rows does.
        """
        if not 1 < len(self.fields) <= MAX_ORDERED_FIELDS:
            return None

        def ordered(*, is_sorted: bool) -> tuple[float, tuple[Field, ...]]:
            # Of equal orders the first one is taken, which is nearest to the present one.
            best = max(permutations(self.fields), key=lambda fields: self._share(fields, is_sorted=is_sorted))
            return self._share(best, is_sorted=is_sorted), best

        then, best = ordered(is_sorted=True)
        flag = "" if today.is_sorted else ", and --group-by-prefix"
        as_they_come, best_as_they_come = ordered(is_sorted=False)
        if not today.is_sorted and then - as_they_come < WORTH_IT:
            then, best, flag = as_they_come, best_as_they_come, ""
        return worthwhile(f"{_moves(self.fields, best)}{flag}", today.now, then, rival=today.sorted)

    def _share(self, fields: Sequence[Field], *, is_sorted: bool) -> float:
        """Return the share of the prompts' tokens that are in the cache with the fields in this order."""
        counts, sizes = self.counts, self.sizes
        texts = (counts.characters[field.name] + len(field.text_behind) for field in fields)
        found_up_to = [sizes.in_cache(length) for length in accumulate(texts, initial=len(self.head))]
        total = found_up_to[0] * max(0, counts.rows - 1)
        names: frozenset[str] = frozenset()
        for field, (before, after) in zip(fields, pairwise(found_up_to), strict=True):
            names |= {field.name}
            different = counts.combinations[names]
            # Rows that come in any order find what all combinations of these values have left there.
            if is_sorted or different <= sizes.kept_rows:
                total += max(0, counts.rows - different) * (after - before)
        return sizes.share(total / max(1, counts.rows))


def _moves(present: Sequence[Field], best: Sequence[Field]) -> str:
    """Say in which order fields come, as far as it differs: ``{category} before {body}``."""
    places = [present.index(field) for field in best]
    first_kept = next(place for place in range(len(places)) if places[place:] == sorted(places[place:]))
    names = [f"{{{field.name}}}" for field in best]
    return f"{', '.join(names[:first_kept])} before {names[first_kept]}"
