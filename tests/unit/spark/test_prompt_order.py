"""What another order of a template's texts and columns is worth, by counted combinations of values."""

from itertools import combinations

import pytest
from pyspark.sql.types import StringType, StructField, StructType

from pipemax_spark.rows import prompt_sizes
from pipemax_spark.rows.field_counts import template_fields
from pipemax_spark.rows.prompt_order import Field, FieldCounts, Finding, RowOrder, TemplateOrder
from pipemax_spark.rows.prompt_sizes import PromptSizes

N = 1_000
SCHEMA = StructType([StructField(name, StringType()) for name in ("category", "vendor", "body", "odd name")])


def order_of(
    template: str, different: dict[str, int], *, characters: int = 100, kept_rows: float = 1.0
) -> TemplateOrder:
    """A template over columns of 100 tokens each, with so many values; a combination has as many as it can."""
    head, fields = template_fields(template, SCHEMA)
    names = [*different]
    counted = {}
    for size in range(1, len(names) + 1):
        for some in combinations(names, size):
            product = 1
            for name in some:
                product *= different[name]
            counted[frozenset(some)] = min(N, product)
    literals = len(head) + sum(len(field.text_behind) for field in fields)
    sizes = PromptSizes(
        prompt_tokens=literals + characters * len(fields), tokens_per_character=1.0, block_tokens=1
    )
    kept = prompt_sizes.KEPT_TOKENS / sizes.prompt_tokens
    assert kept_rows < kept
    counts = FieldCounts(rows=N, combinations=counted, characters=dict.fromkeys(names, float(characters)))
    return TemplateOrder(head=head, fields=fields, counts=counts, sizes=sizes)


@pytest.fixture(autouse=True)
def cache_of_ten_rows_of_200_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_sizes, "KEPT_TOKENS", 2_000)


def test_a_template_is_cut_at_its_columns() -> None:
    head, fields = template_fields("Is {{this}} {category} or\n{`odd name`}?", SCHEMA)
    assert head == "Is {this} "
    assert fields == (
        Field(name="category", text_behind=" or\n"),
        Field(name="odd name", text_behind="?"),
    )


def test_a_column_with_few_values_goes_before_one_with_many() -> None:
    order = order_of("{body}{category}", {"body": N, "category": 100})
    today = order.row_order(is_sorted=False)
    assert (today.as_they_come, today.sorted) == (0, 0)
    finding = order.fields_in_order(today)
    # Of 1,000 rows all but 100 find the first 100 of 200 tokens.
    assert finding == Finding(change="{category} before {body}, and --group-by-prefix", now=0, then=0.45)
    assert str(finding).endswith("--group-by-prefix: 45 % of prompt tokens from the cache instead of 0 %")
    assert today.finding() is None
    assert order_of("{category}{body}", {"body": N, "category": 100}).row_order(is_sorted=False) == RowOrder(
        as_they_come=0, sorted=0.45
    )


def test_rows_need_no_sorting_where_the_cache_holds_a_row_of_each_value() -> None:
    order = order_of("{body}{category}", {"body": N, "category": 10})
    finding = order.fields_in_order(order.row_order(is_sorted=False))
    assert finding is not None
    assert (finding.change, finding.then) == ("{category} before {body}", 0.495)
    swapped = order_of("{category}{body}", {"body": N, "category": 10})
    assert swapped.row_order(is_sorted=False).finding() is None


def test_rows_that_are_sorted_already_need_no_flag() -> None:
    order = order_of("{body}{category}", {"body": N, "category": 100})
    finding = order.fields_in_order(order.row_order(is_sorted=True))
    assert finding is not None
    assert finding.change == "{category} before {body}"


def test_all_orders_of_columns_are_compared() -> None:
    order = order_of("{body}{vendor}{category}", {"body": N, "vendor": 40, "category": 10})
    finding = order.fields_in_order(order.row_order(is_sorted=False))
    assert finding is not None
    assert finding.change == "{category}, {vendor} before {body}, and --group-by-prefix"
    assert finding.then == pytest.approx((990 + 600) / 3_000), (
        "of 400 combinations one row each finds nothing"
    )


def test_an_order_must_be_worth_more_than_sorting_alone() -> None:
    order = order_of("{vendor}{category}", {"vendor": 50, "category": 20})
    today = order.row_order(is_sorted=False)
    assert today.sorted == 0.475
    assert order.fields_in_order(today) is None, "it would be 0.49"
    assert today.finding() == Finding(change="--group-by-prefix", now=0, then=0.475)


def test_only_whole_blocks_count() -> None:
    order = order_of("{category}{body}", {"body": N, "category": 100})
    sizes = PromptSizes(prompt_tokens=200, tokens_per_character=1.0, block_tokens=64)
    in_blocks = TemplateOrder(head="", fields=order.fields, counts=order.counts, sizes=sizes)
    assert in_blocks.row_order(is_sorted=False).sorted == pytest.approx(0.9 * 64 / 200)


def test_instructions_behind_a_column_go_first() -> None:
    instructions = "Which language is this written in? Answer with its name."
    order = order_of(f"Text: {{body}}\n{instructions}", {"body": N}, characters=137)
    assert order.sizes.prompt_tokens == 200
    finding = order.instructions_first(order.row_order(is_sorted=False))
    assert finding is not None
    assert finding.change == (
        "57 of 200 prompt tokens are text behind {body}; put it first, and all rows share it"
    )
    assert finding.now == pytest.approx(0.999 * 6 / 200)
    assert finding.then == pytest.approx(0.999 * 63 / 200)
    assert order.fields_in_order(order.row_order(is_sorted=False)) is None, "one column has one order"


def test_labels_of_columns_stay_where_they_are() -> None:
    order = order_of("{body}" + "x" * 60, {"body": N})
    sizes = PromptSizes(prompt_tokens=160, tokens_per_character=1.0, block_tokens=61)
    labels = TemplateOrder(head="", fields=order.fields, counts=order.counts, sizes=sizes)
    assert labels.instructions_first(labels.row_order(is_sorted=False)) is None
    assert order.instructions_first(order.row_order(is_sorted=False)) is not None


def test_instructions_that_sorted_rows_share_already_are_no_finding() -> None:
    order = order_of("{category}" + "x" * 100 + "{body}", {"category": 20, "body": N})
    assert order.instructions_first(order.row_order(is_sorted=False)) is not None
    assert order.instructions_first(order.row_order(is_sorted=True)) is None


def test_a_column_that_is_named_twice_repeats_with_itself() -> None:
    order = order_of("{category}{category}{body}", {"category": 100, "body": N})
    assert order.row_order(is_sorted=False).sorted == pytest.approx(0.9 * 200 / 300)
