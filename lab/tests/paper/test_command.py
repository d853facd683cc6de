"""``python -m lab.paper``, as a shell calls it."""

import json
from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from lab.paper.__main__ import simulate
from pipemax.cli.app import app as pipemax
from tests.fakes.little_profiles import little_options


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    return little_options(tmp_path)


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    """Forty recorded rows."""
    path = tmp_path / "recorded.jsonl"
    rows = [{"prompt_tokens": 50 + 7 * n, "completion_tokens": 3 + n % 9} for n in range(40)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(simulate)
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def message_of(result: Result) -> str:
    """The error, wherever lines were broken."""
    return " ".join(result.output.split())


def test_simulate_prints_a_table_and_writes_json_pictures_and_traces(
    small: list[str], lengths: str, tmp_path: Path
) -> None:
    files = {name: tmp_path / name for name in ("figures.json", "spans.json", "decisions.jsonl")}
    result = run(
        *[*small, "--workload", lengths, "--system", "pipemax,vllm_pp"],
        *["--json", str(files["figures.json"]), "--trace", str(files["spans.json"])],
        *["--decisions", str(files["decisions.jsonl"]), "--plot", str(tmp_path / "plots")],
    )
    assert result.exit_code == 0, result.output
    assert "little on little, recorded, 40 requests" in result.output
    assert "vllm_pp" in result.output
    assert "…" not in result.output
    figures = json.loads(files["figures.json"].read_text())
    assert [entry["system"] for entry in figures] == ["pipemax", "vllm_pp"]
    assert figures[0]["requests"] == 40
    assert json.loads(files["spans.json"].read_text())["traceEvents"]
    assert (tmp_path / "plots" / "overall.png").exists()
    explained = CliRunner().invoke(pipemax, ["trace", "explain", str(files["decisions.jsonl"])])
    assert "40 × RequestAdmitted" in explained.output


def test_simulate_all_runs_every_system(small: list[str], lengths: str, tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    result = run(*small, "--workload", lengths, "--system", "all", "--json", str(path))
    assert result.exit_code == 0, result.output
    systems = [entry["system"] for entry in json.loads(path.read_text())]
    assert {"pipemax", "vllm_tp", "td_pipe", "seesaw_t4p2", "flexgen", "static_25", "layer_first"} <= {
        *systems
    }


def test_a_changed_number_of_the_node_changes_the_figures(
    small: list[str], lengths: str, tmp_path: Path
) -> None:
    def seconds(*changes: str) -> float:
        path = tmp_path / "figures.json"
        run(*small, "--workload", lengths, "--system", "vllm_tp", "--json", str(path), *changes)
        return float(json.loads(path.read_text())[0]["seconds"])

    assert seconds("--set", "all_reduce.bus_bytes_per_s=1e9") > 2 * seconds()


def test_fp8_kv_is_simulated_and_named(small: list[str], lengths: str, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"

    def figures(*options: str) -> tuple[str, dict[str, float]]:
        arguments = ["--workload", lengths, "--system", "pipemax", "--json", str(path)]
        result = run(*small, *arguments, *options)
        return result.output, json.loads(path.read_text())[0]

    told, own = figures()
    assert "8-bit" not in told
    fp8_told, fp8 = figures("--kv-dtype", "fp8")
    assert "little with 8-bit KV on little" in fp8_told
    assert (own["kv_bytes_per_value"], fp8["kv_bytes_per_value"]) == (2, 1)
    assert fp8["total_tokens_per_s"] > own["total_tokens_per_s"], "less is read"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-dtype", "fp4"], "Invalid value for '--kv-dtype'"),
        (["--node", "rtx4090x8"], "no node 'rtx4090x8'; the nearest are rtx5090x8, h100x8, l20x8"),
        (["--model", "gpt2"], "no model profile 'gpt2'; there are"),
        (["--workload", "alpaca"], "no workload profile 'alpaca'; there are"),
        (["--workload", "gone.jsonl"], "gone.jsonl"),
        (["--system", "pipemaxx"], "no system 'pipemaxx'; there are pipemax, vllm_tp"),
        (["--system", ","], "name at least one system"),
        (["--set", "host_memory_bytes"], "--set host_memory_bytes: expected NAME=NUMBER"),
        (["--set", "host_memory_bytes=lots"], "--set host_memory_bytes=lots: expected NAME=NUMBER"),
        (["--set", "host_memory=5e9"], "there is no 'host_memory'; there are"),
        (["--set", "gpu_memory_fraction=1.5"], "gpu_memory_fraction is 1.5, must be at most 1"),
        (["--model", "qwen3-235b-a22b"], "qwen3-235b-a22b does not fit on rtx5090x8"),
        (
            ["--system", "vllm_tp", "--decisions", "d.jsonl"],
            "add pipemax to --system, which names only vllm_tp",
        ),
        (["--requests", "0"], "--requests"),
    ],
)
def test_a_bad_call_is_refused_in_one_line(arguments: list[str], message: str) -> None:
    result = run("--requests", "20", *arguments)
    assert result.exit_code == 2
    assert message in message_of(result)
    assert "Traceback" not in result.output
