"""How much of sampled prompts earlier ones have left in the cache, as they come and if sorted."""

import pytest

from pipemax.wire import ServerStats
from pipemax_spark.rows import prompt_sizes
from pipemax_spark.rows.prefix import SampledPrompts, hit_rate, row_order
from pipemax_spark.rows.prompt_order import RowOrder
from pipemax_spark.rows.prompt_sizes import CountedTokens, PromptSizes, sizes_of

DOCUMENTS = [f"Read: {letter * 160}" for letter in "abcd"]
PROMPTS = [f"{document}. Question {i}" for i in range(5) for document in DOCUMENTS]


def order_of(
    texts: list[str], *, kept_rows: int = 1, is_sorted: bool = False, reuses: bool = True
) -> RowOrder:
    """The order's shares where a character is a token, blocks have one token, and so many rows are kept."""
    sizes = PromptSizes(
        prompt_tokens=prompt_sizes.KEPT_TOKENS / kept_rows, tokens_per_character=1.0, block_tokens=1
    )
    return row_order(SampledPrompts(texts=texts), sizes, is_sorted=is_sorted, reuses=reuses)


def tokens(share: float, kept_rows: int = 1) -> float:
    return share * prompt_sizes.KEPT_TOKENS / kept_rows


def test_sorting_brings_prompts_together_that_begin_alike() -> None:
    order = order_of(PROMPTS)
    # Of each row but the first: "Read: ". If sorted, of 16 rows the document and "Question" too.
    assert tokens(order.as_they_come) * 20 == pytest.approx(19 * 6)
    assert tokens(order.sorted) * 20 == pytest.approx(3 * 6 + 16 * len(f"{DOCUMENTS[0]}. Question "))
    assert order.now == order.as_they_come
    assert order_of(PROMPTS, is_sorted=True).now == order.sorted


def test_prompts_that_the_cache_still_holds_need_no_sorting() -> None:
    order = order_of(PROMPTS, kept_rows=4)
    assert order.as_they_come == pytest.approx(order.sorted)
    assert order_of(PROMPTS, kept_rows=3).as_they_come < order.sorted / 2


def test_only_the_draw_of_a_large_table_is_kept_that_its_rows_would_be() -> None:
    sizes = PromptSizes(prompt_tokens=prompt_sizes.KEPT_TOKENS / 400, tokens_per_character=0.2)
    near, far = (
        row_order(SampledPrompts(texts=PROMPTS, one_in=one_in), sizes, is_sorted=False, reuses=True)
        for one_in in (100, 101)
    )
    assert near.as_they_come == pytest.approx(near.sorted)
    assert far.as_they_come < far.sorted / 2


def test_equal_prompts_count_only_where_each_is_computed() -> None:
    assert tokens(order_of(["same"] * 4).sorted) == 0
    assert tokens(order_of(["same"] * 4, reuses=False).sorted) == 3


@pytest.mark.parametrize("prompts", [["a"], ["", ""], ["same", "same"]])
def test_too_few_prompts_are_worth_nothing(prompts: list[str]) -> None:
    assert order_of(prompts).finding() is None


def test_sorting_is_a_finding_from_a_tenth_of_the_tokens_on() -> None:
    finding = RowOrder(as_they_come=0.04, sorted=0.41).finding()
    assert str(finding) == "--group-by-prefix: 41 % of prompt tokens from the cache instead of 4 %"
    assert RowOrder(as_they_come=0.04, sorted=0.13).finding() is None
    assert RowOrder(as_they_come=0.04, sorted=0.41, is_sorted=True).finding() is None


def test_sizes_come_from_the_tokens_counted_with_what_stands_before_each_prompt() -> None:
    texts = ["Say: " + "a" * 35, "Say: " + "b" * 75]  # on average 60 characters, 5 of them shared
    counted = CountedTokens(of_prompts=[120, 240], shared=70)
    sizes = sizes_of(texts, counted)
    assert sizes.tokens_per_character == (180 - 70) / (60 - 5)
    assert sizes.overhead_tokens == 70 - 2 * 5
    assert sizes.prompt_tokens == 180
    assert sizes.in_cache(5) == 64, "70 tokens are four whole blocks"


def test_questions_after_the_first_find_the_document_in_the_cache() -> None:
    texts = ["a" * 100, "b" * 60]
    # Prompts of 80 tokens and a question of 20 characters each, a token for each character.
    sizes = sizes_of(texts, CountedTokens(of_prompts=[120, 120, 80, 80]), questions=["q" * 20] * 2)
    assert (sizes.tokens_per_character, sizes.prompt_tokens) == (1.0, 200.0)
    assert sizes.again_tokens == 80
    assert sizes.share(0) == 0.4


def test_without_counts_four_characters_are_a_token() -> None:
    sizes = sizes_of(["a" * 80], CountedTokens(block_tokens=8), system="s" * 40)
    assert (sizes.prompt_tokens, sizes.overhead_tokens, sizes.in_cache(8)) == (30, 10, 8)


def test_the_hit_rate_is_that_of_the_engines_that_say_one() -> None:
    def server(**metrics: float) -> ServerStats:
        return ServerStats(
            server_id="s", host="h", pid=1, at_unix_s=0.0, state="ready", engine_metrics=metrics
        )

    assert hit_rate([server(), server(prefix_cache_hit_rate=0.2), server(prefix_cache_hit_rate=0.6)]) == 0.4
    assert hit_rate([server()]) is None
