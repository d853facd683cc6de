"""Spark's side in an environment without torch and vLLM, the engine's in another: real vLLM on the demo model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pyspark
import pytest

from tests.spark.processes import SMALL_SPARK, servers_of
from tests.waiting import wait_until

pytestmark = pytest.mark.long  # two minutes: an engine, and two environments

REPOSITORY = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
MODEL = REPOSITORY / "examples" / "model"
TEMPLATE = "Package: {package}\\nSummary: {summary}\\nDescription: {description}"
ROWS = 40


@pytest.fixture(scope="module")
def spark_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """From the lock of Spark's side and this project's wheel."""
    directory = tmp_path_factory.mktemp("spark-environment")
    python = directory / "venv" / "bin" / "python"
    uv = str(BIN / "uv")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", directory],
        cwd=REPOSITORY,
        check=True,
    )
    (wheel,) = directory.glob("*.whl")
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, directory / "venv"], check=True)
    lock = REPOSITORY / "requirements" / "spark.lock"
    subprocess.run([uv, "pip", "sync", "-q", "--python", python, lock], check=True)
    subprocess.run([uv, "pip", "install", "-q", "--no-deps", "--python", python, wheel], check=True)
    return python.parent


def test_the_demo_table_through_both_gives_the_tokens_of_transformers(
    spark_environment: Path, tmp_path: Path
) -> None:
    for module in ("torch", "vllm"):
        missing = subprocess.run(
            [spark_environment / "python", "-c", f"import {module}"], capture_output=True, check=False
        )
        assert missing.returncode != 0, f"{module} is in the environment that is to be without it"
    source = tmp_path / "in.parquet"
    table = pq.read_table(REPOSITORY / "examples" / "data" / "debian_packages.parquet").slice(0, ROWS)
    pq.write_table(table, source)
    engine = tmp_path / "engine.yaml"
    # float32, so that another implementation's arithmetic gives the same tokens.
    engine.write_text("dtype: float32\nmax_model_len: 512\nmax_num_seqs: 32\ncpu_kv_gib: 0.25\n")
    done = subprocess.run(
        [
            *(spark_environment / "pipemax-annotate", "--input", source, "--output", tmp_path / "out"),
            *("--template", TEMPLATE, "--id-columns", "package", "--max-tokens", "24"),
            *("--model", MODEL, "--engine", engine, "--engine-python", sys.executable),
            *("--summary", tmp_path / "summary.json"),
        ],
        cwd=tmp_path,  # neither activated nor in the repository
        env={
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            # Delta's jars, which are in the other environment.
            "SPARK_CONF_DIR": str(Path(pyspark.__file__).parent / "conf"),
            "PYSPARK_PYTHON": str(spark_environment / "python"),
            "PYSPARK_SUBMIT_ARGS": f"{SMALL_SPARK} pyspark-shell",
            "PIPEMAX_LOG_DIR": str(tmp_path / "logs"),
        },
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["rows_out"], summary["rows_error"], summary["engines"]) == (ROWS, 0, 1)
    texts = {row["package"]: row["annotation"]["text"] for row in pq.read_table(tmp_path / "out").to_pylist()}
    assert texts == expected_texts(table.to_pylist())
    wait_until(lambda: not servers_of(tmp_path / "logs"), 120, "the engine server ends with the application")


def expected_texts(rows: list[dict[str, str]]) -> dict[str, str]:
    """By Hugging Face transformers, greedily, one by one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    texts = {}
    for row in rows:
        prompt = TEMPLATE.replace("\\n", "\n").format(**row)
        message = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        generated = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :]
        texts[row["package"]] = tokenizer.decode(generated, skip_special_tokens=True)
    return texts
