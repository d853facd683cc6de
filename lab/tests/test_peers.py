"""The comparison's load and its table: nothing here starts an engine."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lab.bench.peers.engines import flags
from lab.bench.peers.load import REPOSITORY, Load, write_model, write_table
from lab.bench.peers.recorder import Recorder
from lab.bench.peers.results import Result, add_result, markdown, read_results

RESULT = Result(
    system="bare_engine",
    lengths="skewed",
    rows=1000,
    batch_rows=64,
    engines=1,
    start_s=[30.0],
    seconds=[10.0, 9.0, 11.0],
    output_tokens=29_000,
    load_average=[0.1, 2.0],
    ended_at="2026-11-21T00:00:00+00:00",
)
OURS = replace(RESULT, system="pipemax_spark", seconds=[12.5, 12.0, 13.0])
UDF = replace(RESULT, system="plain_udf_one_engine", seconds=[30.0, 26.0, 31.2])


def make_load(directory: Path, *, lengths: str = "skewed", rows: int = 2000) -> Load:
    return Load(directory=str(directory), rows=rows, lengths=lengths, repeats=3, cores=(0, 1))


def test_a_table_is_the_same_every_time_and_skewed_lengths_have_about_the_mean_of_uniform_ones(
    tmp_path: Path,
) -> None:
    skewed, uniform = make_load(tmp_path / "a"), make_load(tmp_path / "b", lengths="uniform")
    for load in (skewed, uniform):
        Path(load.directory).mkdir()
        write_table(load)
    rows = skewed.prompts()
    lengths = [row["max_tokens"] for row in rows]
    assert set(lengths) == {4, 32, 200}
    assert sum(lengths) == pytest.approx(sum(row["max_tokens"] for row in uniform.prompts()), rel=0.1)
    write_table(skewed)
    assert skewed.prompts() == rows
    assert Load.from_json(skewed.to_json()) == skewed


def test_answers_of_another_length_missing_or_too_many_are_refused(tmp_path: Path) -> None:
    load = make_load(tmp_path, rows=10)
    write_table(load)
    right = {row["id"]: row["max_tokens"] for row in load.prompts()}
    assert load.check_answers(right) == sum(right.values())
    for wrong in (right | {3: right[3] - 1}, right | {10: 4}, {i: n for i, n in right.items() if i != 9}):
        with pytest.raises(ValueError, match="1 of 10 rows"):
            load.check_answers(wrong)


def test_the_model_has_no_end_token_and_its_own_weights_else(tmp_path: Path) -> None:
    load = make_load(tmp_path)
    write_model(load)
    model, original = Path(load.model), REPOSITORY / "examples" / "model"
    tokenizer, config = (
        json.loads((model / f"{name}.json").read_text()) for name in ("tokenizer_config", "config")
    )
    assert tokenizer["eos_token"] is None
    assert config == json.loads((original / "config.json").read_text()) | {"eos_token_id": None}
    assert json.loads((model / "generation_config.json").read_text())["eos_token_id"] is None
    weights = "model.safetensors"
    assert (model / weights).read_bytes() == (original / weights).read_bytes()


def test_both_spellings_of_the_engine_name_the_same_limits(tmp_path: Path) -> None:
    load = make_load(tmp_path)
    vllm, pipemax = load.vllm_arguments(), load.pipemax_engine()
    same = {name for name in vllm.keys() & pipemax.keys() if vllm[name] == pipemax[name]}
    assert same == vllm.keys() - {"kv_cache_memory_bytes", "enforce_eager"}
    assert vllm["kv_cache_memory_bytes"] == pipemax["cpu_kv_gib"] * (1 << 30)
    assert flags({"max_model_len": 512, "enforce_eager": True, "enable_prefix_caching": False}) == [
        *("--max-model-len", "512"),
        "--enforce-eager",
        "--no-enable-prefix-caching",
    ]


def test_every_run_is_on_disk_when_it_has_ended(tmp_path: Path) -> None:
    load = make_load(tmp_path, rows=10)
    write_table(load)
    recorder = Recorder(load, tmp_path / "result.json", engines=2)
    recorder.started(5.0)
    recorder.ran(1.5, {row["id"]: row["max_tokens"] for row in load.prompts()})
    with pytest.raises(ValueError, match="other output tokens"):
        recorder.ran(1.4, {})
    recorded = json.loads((tmp_path / "result.json").read_text())
    assert (recorded["engines"], recorded["start_s"], recorded["seconds"]) == (2, [5.0], [1.5])


def test_a_result_replaces_only_that_of_the_same_load(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    other_load, again = replace(RESULT, lengths="uniform"), replace(RESULT, seconds=[8.0])
    for result in (RESULT, UDF, other_load, again):
        add_result(path, result)
    assert read_results(path) == [again, UDF, other_load]
    path.write_text("{}")
    assert read_results(path) == []
    path.write_text('[{"rows": 3}]')
    with pytest.raises(ValueError, match="name another file"):
        read_results(path)


def test_the_table_compares_medians_and_says_how_far_the_spread_lets_them_go() -> None:
    failed = replace(UDF, system="ray_data_llm", seconds=[], start_s=[], failure="it ended with 1")
    table = markdown([RESULT, OURS, UDF, failed, replace(UDF, rows=50)])
    small, large = table.split("\n\n**Skewed")
    assert "| plain_udf_one_engine | 1 | 1.7 |" in small, "no ratio to runs of another number of rows"
    assert "| bare_engine | 1 | 100.0 | 20.0% of 3 | 2,900 | 30 | 1.000 | ×0.80 (0.69–0.92) |" in large
    assert "| pipemax_spark | 1 | 80.0 | 8.0% of 3 | 2,320 | 30 | 0.800 |  |" in large
    assert "| plain_udf_one_engine | 1 | 33.3 | 17.3% of 3 | 967 | 30 | 0.333 | ×2.40 (2.00–2.60) |" in large
    assert "- ray_data_llm failed: it ended with 1" in large
