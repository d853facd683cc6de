"""Rows drawn from a table, and their lengths."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipemax.checkpoint.prompt_encoder import PromptEncoder
from pipemax.config import ChatMode
from pipemax.domain.workload import LengthStatistics
from pipemax.policy.table_sample import (
    PromptSource,
    as_workload,
    count_prompts,
    drawn_outputs,
    read_outputs,
    sample_rows,
)


class WordTokenizer:
    """A token for each word."""

    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [2 + sum(map(ord, word)) for word in text.split()]

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError


def encoder(max_model_len: int = 100) -> PromptEncoder:
    return PromptEncoder(WordTokenizer(), chat=ChatMode.NEVER, max_model_len=max_model_len)


def test_rows_are_drawn_without_duplicates_over_all_files(tmp_path: Path) -> None:
    for number in range(3):
        pq.write_table(
            pa.table({"id": range(10 * number, 10 * number + 10), "other": ["x"] * 10}),
            tmp_path / f"{number}.parquet",
            row_group_size=4,
        )
    sampled = sample_rows(tmp_path, ["id"], 20)
    ids = sampled.columns.column("id").to_pylist()
    assert sampled.num_rows_of_table == 30
    assert sampled.columns.column_names == ["id"]
    assert len(set(ids)) == 20
    assert {number // 10 for number in ids} == {0, 1, 2}
    assert sorted(sample_rows(tmp_path, ["id"], 100).columns.column("id").to_pylist()) == [*range(30)]


def test_a_large_table_is_sampled_by_row_groups(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(120_000)}), tmp_path / "t.parquet", row_group_size=2_000)
    sampled = sample_rows(tmp_path, ["id"], 5_000)
    groups = {number // 2_000 for number in sampled.columns.column("id").to_pylist()}
    assert (sampled.num_rows_of_table, sampled.columns.num_rows, len(groups)) == (120_000, 5_000, 32)


@pytest.mark.parametrize(("columns", "message"), [(["prompt"], "no column prompt; there are id")])
def test_a_missing_column_is_named(tmp_path: Path, columns: list[str], message: str) -> None:
    pq.write_table(pa.table({"id": [1]}), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=message):
        sample_rows(tmp_path / "t.parquet", columns, 1)


def test_what_is_no_parquet_is_told(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_text("text")
    with pytest.raises(ValueError, match="cannot be read"):
        sample_rows(tmp_path / "t.parquet", ["id"], 1)


def test_prompts_are_counted_and_rows_without_one_left_out() -> None:
    rows = pa.table({"text": ["one two", None, "one two three", " ", "w " * 50], "n": [1, 2, 3, 4, 5]})
    counted = count_prompts(
        rows, PromptSource(template="say {text}"), encoder(20), system=None, max_model_len=20
    )
    assert counted.tokens.tolist() == [4, 5, 2]  # one token before each prompt; null and too long are out
    assert counted.rows.column("n").to_pylist() == [1, 3, 4]
    assert counted.shared_prefix_tokens == 1  # the shortest prompt has a token of its own


def test_a_template_takes_braces_and_columns_and_refuses_a_text_without_any() -> None:
    source = PromptSource(template="{{{a}}} and {b}")
    assert source.columns == ["a", "b"]
    assert source.prompt({"a": "{x}", "b": 2}) == "{{x}} and 2"
    assert source.prompt({"a": None, "b": 2}) is None
    with pytest.raises(ValueError, match="names no column"):
        PromptSource(template="always the same")
    with pytest.raises(ValueError, match="exactly one of"):
        PromptSource(column="a", tokens_column="b")


def test_lengths_are_read_from_columns_and_outputs_end_at_the_longest_sequence() -> None:
    rows = pa.table({"prompt": [10, None, 0, 90, 40], "output": [5, 6, 7, 8, 200]})
    counted = count_prompts(rows, PromptSource(tokens_column="prompt"), None, system=None, max_model_len=80)
    assert counted.tokens.tolist() == [10, 40]
    workload = as_workload("t", counted, read_outputs(counted.rows, "output"), 80)
    assert workload.output_tokens.tolist() == [5, 40]
    with pytest.raises(ValueError, match="none of the 5 sampled rows"):
        count_prompts(rows, PromptSource(tokens_column="prompt"), None, system=None, max_model_len=5)


@pytest.mark.parametrize("values", [[1.5], ["a"]])
def test_a_column_of_lengths_must_hold_integers(values: list[Any]) -> None:
    with pytest.raises(ValueError, match="not of integers"):
        read_outputs(pa.table({"n": values}), "n")


def test_output_lengths_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="null or below 1"):
        read_outputs(pa.table({"n": [3, 0]}), "n")


def test_drawn_outputs_have_the_mean_and_fit_the_longest_sequence() -> None:
    prompts = np.full(500, 100, dtype=np.int64)
    statistics = LengthStatistics(family="lognormal", mean=30.0, median=25.0, least=1, most=200)
    outputs = drawn_outputs(prompts, statistics, max_model_len=180)
    assert outputs.mean() == pytest.approx(30, rel=0.05)
    assert outputs.max() <= 80
