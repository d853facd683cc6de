"""``pipemax rehearse``, as a shell calls it: vLLM's real scheduler over a small node that is not there."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from pipemax.cli.app import app
from pipemax.config import EngineConfig
from pipemax.presets import read_preset

DEMO = Path(__file__).parents[3] / "examples"


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """Four GPUs with four layers of 70B on each."""
    node = read_preset("nodes", "rtx5090x8") | {"name": "little", "num_gpus": 4}
    node["gpu"]["memory_bytes"] = 10.4e9  # of which some 10,000 tokens of KV
    model = read_preset("models", "llama2-70b") | {"name": "little", "num_layers": 16}
    (tmp_path / "node.yaml").write_text(yaml.safe_dump(node))
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(model))
    return [
        "--node",
        str(tmp_path / "node.yaml"),
        "--model",
        str(tmp_path / "model.yaml"),
        "--host-factor",
        "0",
    ]


def engine(directory: Path, **values: object) -> list[str]:
    path = directory / "engine.yaml"
    path.write_text(yaml.safe_dump(values))
    return ["--engine", str(path)]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["rehearse", *arguments], catch_exceptions=False)


def message_of(result: Result) -> str:
    return " ".join(result.output.split())


def lengths_table(directory: Path, rows: int = 900) -> Path:
    path = directory / "rows.parquet"
    prompts = [60 + 13 * number % 200 for number in range(rows)]
    pq.write_table(
        pa.table({"prompt": prompts, "output": [10 + number % 30 for number in range(rows)]}), path
    )
    return path


def test_an_open_config_is_rehearsed_in_all_its_ways_and_ends_with_the_lines_to_use(
    small: list[str], tmp_path: Path
) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "kv.svg"
    result = run(
        *small,
        *engine(tmp_path, max_model_len=512),
        *["--input", str(lengths_table(tmp_path)), "--prompt-tokens-column", "prompt"],
        *["--output-tokens-column", "output", "--sample", "300", "--rows", "1000000", "--price", "20"],
        *["--json", str(figures), "--picture", str(picture)],
    )
    assert result.exit_code == 0, result.output
    assert "300 of 1,000,000 rows of" in message_of(result)
    assert "Nothing was computed" in message_of(result)
    report = json.loads(figures.read_text())
    assert report["rehearsed_rows"] == 300
    assert {entry["engine"] for entry in report["runs"]} == {"vllm", "pipemax separated", "pipemax mixed"}
    for entry in report["runs"]:
        tokens = 1_000_000 * (report["mean_prompt_tokens"] + report["mean_output_tokens"])
        assert entry["hours"] == pytest.approx(tokens / entry["steady_tokens_per_s"] / 3600, rel=0.02)
        assert entry["cost"] == pytest.approx(20 * entry["hours"])
        steady = entry["steady"]
        shares = [steady[name] for name in ("prompts", "decode", "mixed", "idle")]
        assert sum(shares) == pytest.approx(1.0, abs=0.05)
        assert (steady["mixed"] > 0.1) == (entry["engine"] != "pipemax separated")
        assert max(gpu for _, gpu, _ in entry["kv"]) > 0.5
        assert (max(host for _, _, host in entry["kv"]) > 0) == entry["engine"].startswith("pipemax")
        assert entry["kv"][-1][0] == pytest.approx(entry["seconds"], rel=0.01)
    assert "<svg" in picture.read_text()
    printed = yaml.safe_load(result.stdout.partition("engine.yaml:\n")[2])
    assert printed == report["engine_config"]
    EngineConfig.parse({"model": "m", **printed})  # it is a config that an engine takes


def test_prompts_of_the_demo_table_are_counted_by_the_engines_tokenizer(
    small: list[str], tmp_path: Path
) -> None:
    figures = tmp_path / "figures.json"
    result = run(
        *small,
        *engine(
            tmp_path, model=str(DEMO / "model"), max_model_len=512, policy="vllm", max_num_batched_tokens=512
        ),
        *["--input", str(DEMO / "data" / "debian_packages.parquet"), "--template", "{package}\\n{summary}"],
        *["--max-tokens", "24", "--output-mean", "8", "--output-median", "7", "--sample", "40"],
        *["--json", str(figures)],
    )
    assert result.exit_code == 0, result.output
    report = json.loads(figures.read_text())
    assert report["table_rows"] == 2223
    assert [entry["max_num_batched_tokens"] for entry in report["runs"]] == [512]
    assert 8 < report["mean_prompt_tokens"] < 60
    assert report["mean_output_tokens"] == pytest.approx(8, rel=0.2)
    assert report["shared_prefix_tokens"] > 0  # the chat template's beginning


def test_a_profile_stands_for_a_table_and_half_a_node_for_an_engine(small: list[str], tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    more_memory = ["--set", "gpu.memory_bytes=20e9"]
    result = run(
        *small,
        *more_memory,
        *engine(tmp_path, policy="pipemax", batching="separated", pipeline_parallel_size=2, num_batches=3),
        *["--workload", "sharegpt", "--output-mean", "30", "--output-median", "25", "--max-tokens", "60"],
        *["--sample", "60", "--json", str(figures)],
    )
    assert result.exit_code == 0, result.output
    report = json.loads(figures.read_text())
    assert (report["engines"], report["pipeline_stages"]) == (2, 2)
    (only,) = report["runs"]
    assert only["policy"] == "pipemax"
    assert only["cost"] is None


@pytest.mark.parametrize(
    ("arguments", "values", "message"),
    [
        ([], {"block_size": 32}, "block_size 32"),
        (["--input", "gone.parquet", "--prompt-column", "a"], {}, "no table at gone.parquet"),
        (["--input", "rows.parquet"], {}, "exactly one of --prompt-column"),
        (["--input", "rows.parquet", "--prompt-tokens-column", "words"], {}, "has no column words"),
        (["--input", "rows.parquet", "--prompt-column", "prompt"], {"model": "/no/such"}, "cannot be read"),
        (["--max-tokens", "5"], {}, "--max-tokens 5 is below the mean output"),
        (["--workload", "alpaca"], {}, "no workload profile 'alpaca'"),
        (["--picture", "kv.docx"], {}, "must end in .svg, .png, .pdf"),
        (["--json", "no/such/figures.json"], {}, "there is no directory"),
    ],
)
def test_a_bad_call_is_refused_in_one_line_before_anything_runs(
    small: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    values: dict[str, object],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    lengths_table(tmp_path, rows=20)
    result = run(*small, *engine(tmp_path, **values), *arguments)
    assert result.exit_code == 2, result.output
    assert message in message_of(result)
    assert "simulated" not in result.output
