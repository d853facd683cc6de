"""``pipemax plan-capacity`` and ``trace explain``, as a shell calls them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from pipemax.cli.app import app
from pipemax.cli.capacity import count_of_rows
from tests.fakes.little_profiles import little_options
from tests.golden.scenarios import TRACES

CONFIGS = Path(__file__).parents[2] / "fakes" / "model_configs"
FILLED = ["--workload", "longbench", "--sample", "120"]
"""Rows so long that these fill the engines."""


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    return little_options(tmp_path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def message_of(result: Result) -> str:
    """The error, wherever lines were broken."""
    return " ".join(result.output.split())


def test_plan_capacity_tells_hours_and_cost_of_every_layout(small: list[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    result = run(
        *["plan-capacity", "--rows", "1M", "--price", "20", *small, *FILLED],
        *["--output-mean", "30", "--output-median", "20", "--host-memory", "64", "--host-memory", "256"],
        *["--gpus-per-engine", "8", "--gpus-per-engine", "4", "--json", str(path)],
    )
    assert result.exit_code == 0, result.output
    options = json.loads(path.read_text())
    (chosen,) = (option for option in options if option["chosen"])
    assert f"{chosen['replicas']} × tp {chosen['tensor_parallel']} × pp" in message_of(result)
    layouts = {(o["replicas"], o["tensor_parallel"], o["pipeline_parallel"]) for o in options}
    assert layouts == {(1, 1, 8), (1, 2, 4), (1, 4, 2), (1, 8, 1)}
    assert "left out: 2 × tp 1 × pp 4: little does not fit on little" in message_of(result)
    pipemax = [option for option in options if option["policy"] == "pipemax"]
    assert {option["host_memory_bytes"] for option in pipemax} == {64e9, 256e9}
    assert {option["batching"] for option in pipemax} == {"separated", "mixed"}
    for option in options:
        assert option["cost"] == pytest.approx(20 * option["hours"], abs=2e-3)


def test_plan_capacity_calculates_with_waves_and_fp8_kv_where_it_is_told_to(
    small: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    arguments = ["plan-capacity", "--rows", "1M", "--price", "20", *small, "--sample", "110"]
    arguments += ["--output-mean", "60", "--output-median", "40"]
    arguments += ["--gpus-per-engine", "2", "--set", "num_gpus=2", "--set", "gpu.memory_bytes=1.8e10"]

    def rates(*options: str) -> dict[str | None, float]:
        """By the batching of policy pipemax; of stock vLLM under None."""
        result = run(*arguments, "--json", str(path), *options)
        assert result.exit_code == 0, result.output
        assert ("PipeMax with waves" in message_of(result)) is ("--waves" in options)
        assert ("on little with fp8 KV" in message_of(result)) is ("fp8" in options)
        plan = json.loads(path.read_text())
        with_waves = {option["policy"] for option in plan if option["waves"]}
        assert with_waves == ({"pipemax"} if "--waves" in options else set())
        assert {option["kv_dtype"] for option in plan} == {"fp8" if "fp8" in options else "auto"}
        return {option["batching"]: option["tokens_per_s"] for option in plan}

    without, waves, fp8 = rates(), rates("--waves"), rates("--kv-dtype", "fp8", "--sample", "220")
    assert all(waves[batching] != without[batching] for batching in ("mixed", "separated"))
    assert waves[None] == without[None] < fp8[None]


@pytest.mark.long  # simulation
def test_plan_capacity_compares_kinds_of_node(small: list[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    arguments = ["--rows", "60", "--price", "20", "--workload", "longbench", "--gpus-per-engine", "8"]
    arguments += ["--output-mean", "30", "--output-median", "20"]
    unpriced = run("plan-capacity", *small, *arguments, "--node", "rtx5090x8")
    assert unpriced.exit_code == 2
    assert "2 nodes and 1 prices: give --price once for each --node" in message_of(unpriced)
    result = run(
        "plan-capacity", *small, *arguments, "--node", "rtx5090x8", "--price", "1", "--json", str(path)
    )
    assert result.exit_code == 0, result.output
    options = json.loads(path.read_text())
    assert [option["node"] for option in options if option["chosen"]] == ["little", "rtx5090x8"]
    assert "cheapest" in message_of(result)


@pytest.fixture
def cascade(tmp_path: Path) -> list[str]:
    """A smaller model, with nearly as much room for rows."""
    model = yaml.safe_load((tmp_path / "model.yaml").read_text()) | {"name": "less", "ffn_size": 20_480}
    (tmp_path / "less.yaml").write_text(yaml.safe_dump(model))
    (tmp_path / "small.yaml").write_text(yaml.safe_dump({"model": str(tmp_path / "less.yaml")}))
    return ["--cascade", str(tmp_path / "small.yaml")]


def test_a_cascade_takes_the_small_models_hours_and_the_large_models_for_the_rest(
    small: list[str], cascade: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    arguments = ["plan-capacity", "--rows", "1M", "--price", "20", *small, *FILLED, "--sample", "180"]
    arguments += ["--gpus-per-engine", "8", "--output-mean", "30", "--output-median", "20"]
    result = run(*arguments, "--json", str(path), *cascade, "--kept-share", "0.4:0.6:0.7")
    assert result.exit_code == 0, result.output
    *options, both = json.loads(path.read_text())
    (alone,) = (option["hours"] for option in options if option["chosen"])
    figures = both["cascade"]
    assert figures["large_hours"] == alone > figures["small_hours"] > 0
    for name, kept in (("low", 0.7), ("middle", 0.6), ("high", 0.4)):
        assert figures["hours"][name] == pytest.approx(figures["small_hours"] + (1 - kept) * alone, abs=1e-3)
        assert figures["cost"][name] == pytest.approx(20 * figures["hours"][name], abs=1e-3)
    assert "cascade: less answers 1,000,000 rows in" in message_of(result)
    assert "then little 40% of them (30% to 60%)" in message_of(result)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ([], "--cascade and --kept-share go together"),
        (["--kept-share", "0.4"], "is not LOW:MIDDLE:HIGH"),
        (["--kept-share", "0.6:0.4:0.7"], "none less than the one before"),
    ],
)
def test_a_cascade_without_its_forecast_is_refused(
    small: list[str], cascade: list[str], kept: list[str], message: str
) -> None:
    result = run("plan-capacity", "--rows", "10", "--sample", "20", *small, *cascade, *kept)
    assert result.exit_code == 2
    assert message in message_of(result)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--prompt-mean", "100", "--prompt-median", "5000"],
            "mean and median must lie between least and most",
        ),
        (["--gpus-per-engine", "3"], "has 8 GPUs, which 3 do not divide"),
        (["--rows", "0"], "--rows"),
        (["--price", "-1"], "--price"),
    ],
)
def test_plan_capacity_names_what_is_wrong(small: list[str], arguments: list[str], message: str) -> None:
    result = run("plan-capacity", "--rows", "10", "--price", "1", "--sample", "20", *small, *arguments)
    assert result.exit_code == 2
    assert message in message_of(result)


def test_plan_capacity_lists_the_nearest_names_of_an_unknown_node() -> None:
    result = run("plan-capacity", "--rows", "10", "--price", "1", "--node", "g6.49xlarge")
    assert result.exit_code == 2
    assert "no node 'g6.49xlarge'; the nearest are g6.24xlarge, g6.48xlarge, g6.xlarge." in message_of(result)


@pytest.mark.parametrize(
    ("text", "rows"),
    [("250000", 250_000), ("250k", 250_000), ("1.5M", 1_500_000), ("2_000", 2000), ("2B", 2e9)],
)
def test_rows_may_be_written_in_thousands_millions_and_billions(text: str, rows: int) -> None:
    assert count_of_rows(text) == rows


@pytest.mark.parametrize("text", ["", "many", "0", "-3", "1.0005k", "1MM"])
def test_what_is_no_number_of_rows_is_refused(text: str) -> None:
    result = run("plan-capacity", "--rows", text)
    assert result.exit_code == 2
    assert "no number of rows" in message_of(result)


def test_a_model_that_pipemax_does_not_run_is_planned_under_stock_vllm() -> None:
    result = run(
        *[
            "plan-capacity",
            "--rows",
            "64",
            "--model",
            str(CONFIGS / "deepseek-v3.2.json"),
            "--node",
            "8xB200",
        ],
        *["--gpus-per-engine", "8", "--output-mean", "30", "--output-median", "20"],
    )
    assert result.exit_code == 0, result.output
    assert "planning 64 rows by deepseek-v3.2 (671.8B parameters, 674 GB" in message_of(result)
    assert "does not run this model: it has sparse latent attention" in message_of(result)


def test_a_model_of_the_hub_is_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--meta--Llama-AWQ" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    arguments = ["plan-capacity", "--rows", "8", "--node", "2xL40S", "--model", "meta/Llama-AWQ"]
    missing = run(*arguments)
    assert "get it with: hf download meta/Llama-AWQ config.json" in message_of(missing)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc\n")
    (snapshot / "config.json").write_text((CONFIGS / "llama-3.1-70b-awq.json").read_text())
    result = run(*arguments, "--gpus-per-engine", "2", "--output-mean", "20", "--output-median", "15")
    assert "planning 8 rows by meta/Llama-AWQ (70.6B parameters, 40 GB" in message_of(result)
    assert "chosen: " in message_of(result)


def test_an_unknown_model_lists_what_there_is() -> None:
    result = run("plan-capacity", "--rows", "10", "--model", "llama-9")
    assert "no model 'llama-9': give one of the profiles gemma-3-27b" in message_of(result)


def test_a_sample_that_fills_no_layout_is_refused_with_the_rows_that_would(small: list[str]) -> None:
    result = run("plan-capacity", "--rows", "1M", *small, "--gpus-per-engine", "8", "--sample", "40")
    assert re.search(r"40 rows fill the engines of no layout, [\d,]+ would", message_of(result))


def test_a_plan_loads_no_engine_and_no_spark_and_has_hours_only_without_a_price(
    small: list[str], tmp_path: Path
) -> None:
    """A laptop with numpy plans."""
    path = tmp_path / "plan.json"
    heavy = ["torch", "vllm", "transformers", "pydantic", "pyspark", "deltalake"]
    arguments = ["pipemax", "plan-capacity", "--rows", "20", *small, "--gpus-per-engine", "8"]
    arguments += ["--json", str(path)]
    command = (
        f"import sys; sys.modules.update(dict.fromkeys({heavy!r})); sys.argv = {arguments!r}; "
        "from pipemax_spark.cli import pipemax; pipemax()"
    )
    planner = (
        f"import sys; sys.modules.update(dict.fromkeys({[*heavy, 'pyarrow', 'typer', 'rich']!r})); "
        "import pipemax.policy.capacity, pipemax.presets; print('chosen: ')"
    )
    plan, imports = (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        for code in (command, planner)
    )
    for result in (plan, imports):
        assert result.returncode == 0, result.stderr
        assert "chosen: " in result.stdout
    assert plan.stdout.startswith(
        "planning 20 rows by little (14.2B parameters, 28 GB of weights) on little (8 × RTX 5090)"
    )
    assert "hours" in plan.stdout
    assert "cost" not in plan.stdout
    assert {option["cost"] for option in json.loads(path.read_text())} == {None}


def test_trace_explain_says_why_a_step_did_what_it_did() -> None:
    result = run("trace", "explain", str(TRACES / "overflow.jsonl"))
    assert result.exit_code == 0
    assert "the host pool overflows: recomputes" in result.output
    assert "decode, since" in result.output


def test_trace_explain_refuses_another_file_by_name(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    result = run("trace", "explain", str(path))
    assert result.exit_code == 2
    assert "notes.txt is no trace" in message_of(result)
    missing = run("trace", "explain", str(tmp_path / "gone.jsonl"))
    assert missing.exit_code == 2
    assert "gone.jsonl" in message_of(missing)


@pytest.mark.parametrize("command", [["plan-capacity"], ["trace", "explain"]])
def test_help_names_every_option_without_importing_the_simulator(command: list[str]) -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from pipemax.cli.app import app; "
        f"print(CliRunner().invoke(app, {[*command, '--help']!r}).output); "
        "assert not {'numpy', 'matplotlib', 'pipemax.sim', 'torch', 'vllm'} & sys.modules.keys()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "Usage" in result.stdout
