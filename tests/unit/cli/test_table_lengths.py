"""Lengths of rows, taken from tables without Spark."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from pipemax.cli.app import app
from pipemax.cli.table_lengths import SAMPLED_ROWS, output_lengths, prompt_lengths


@pytest.fixture
def texts(tmp_path: Path) -> str:
    """Two files of 20,000 rows: the n-th has n % 100 + 1 words."""
    directory = tmp_path / "texts"
    directory.mkdir()
    for part in range(2):
        words = [number % 100 + 1 for number in range(20_000)]
        table = pa.table({"body": ["word " * count for count in words], "tokens": words})
        pq.write_table(table, directory / f"part-{part}.parquet", row_group_size=1000)
    return str(directory)


def test_ten_thousand_rows_are_sampled_from_all_parts_of_a_table(texts: str) -> None:
    sampled = prompt_lengths(texts, template=None, tokens_column="tokens", tokenizer_directory=None, seed=0)
    assert len(sampled.tokens) == SAMPLED_ROWS
    assert set(sampled.tokens) == set(range(1, 101))
    assert sum(sampled.tokens) / len(sampled.tokens) == pytest.approx(50.5, rel=0.03)


def test_prompts_are_counted_by_the_model_s_tokenizer_where_it_is_at_hand(texts: str, tmp_path: Path) -> None:
    words = {"model": {"type": "WordLevel", "vocab": {"word": 0, "?": 1}, "unk_token": "?"}}
    tokenizer = {"version": "1.0", "added_tokens": [], **words, "pre_tokenizer": {"type": "Whitespace"}}
    tokenizer |= {
        "normalizer": None,
        "post_processor": None,
        "decoder": None,
        "truncation": None,
        "padding": None,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    counted = prompt_lengths(
        texts, template="Say: {body}", tokens_column=None, tokenizer_directory=tmp_path, seed=0
    )
    assert sum(counted.tokens) / len(counted.tokens) == pytest.approx(52.5, rel=0.03), (
        "'Say', ':' and the body"
    )
    guessed = prompt_lengths(texts, template="{body}", tokens_column=None, tokenizer_directory=None, seed=0)
    assert sum(guessed.tokens) / len(guessed.tokens) == pytest.approx(50.5 * 5 / 4, rel=0.03)
    assert guessed.counted.endswith("estimated at 4 characters a token, without a tokenizer.json")


def test_outputs_have_the_lengths_of_an_earlier_run_without_its_errors(tmp_path: Path) -> None:
    rows = [{"completion_tokens": 7, "error": None}, {"completion_tokens": 0, "error": "engine_died"}, None]
    path = tmp_path / "labelled.parquet"
    pq.write_table(pa.table({"annotation": rows * 3}), path)
    assert output_lengths(str(path), seed=0).tokens == (7, 7, 7)


def test_a_delta_table_is_read_as_it_is_now(texts: str, tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    path = str(tmp_path / "delta")
    deltalake.write_deltalake(path, pa.table({"tokens": [1, 1, 1]}))
    deltalake.write_deltalake(path, pa.table({"tokens": [5, 5]}), mode="overwrite")
    sampled = prompt_lengths(path, template=None, tokens_column="tokens", tokenizer_directory=None, seed=0)
    assert sampled.tokens == (5, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--template", "{text}"], "has no column text; it has body, tokens"),
        (["--template", "no column"], "must name columns in braces"),
        (["--prompt-tokens-column", "body"], "column body of"),
        ([], "--input needs one of --template and --prompt-tokens-column"),
    ],
)
def test_what_is_wrong_with_a_table_is_named(texts: str, arguments: list[str], message: str) -> None:
    command = ["plan-capacity", "--rows", "10", "--input", texts, "--output-mean", "20", *arguments]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_plan_takes_the_lengths_of_a_table(texts: str) -> None:
    arguments = ["--rows", "64", "--model", "qwen3-8b", "--node", "2xL40S", "--gpus-per-engine", "1"]
    arguments += ["--input", texts, "--prompt-tokens-column", "tokens"]
    unknown = CliRunner().invoke(app, ["plan-capacity", *arguments], catch_exceptions=False)
    assert "give --output-mean or --outputs-of too" in " ".join(unknown.output.split())
    command = ["plan-capacity", *arguments, "--output-mean", "20"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "10,000 sampled rows of tokens; outputs: 20 on average" in " ".join(result.output.split())
