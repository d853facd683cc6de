"""A cascade with the demo models in real vLLM: how often engines start."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipemax.wire import GenerationSpec
from pipemax_spark.engines.stop import stop_engines
from pipemax_spark.job import cascade, cascade_repeats
from pipemax_spark.request.prompts import PromptSource
from tests.spark.conftest import Jobs
from tests.spark.test_cascade import SEED, facts_of, run_cascade
from tests.spark.test_cascade_pilot import loaded

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_ROWS = 500


def engine(model: str) -> dict[str, Any]:
    return {
        "model": str(EXAMPLES / model),
        "policy": "vllm",
        "dtype": "float32",
        "max_model_len": 512,
        "cpu_kv_gib": 0.25,
        "max_num_seqs": 32,
        "json_whitespace": "any",  # the models have learned JSON with a space behind colons
    }


@pytest.mark.long  # two engines of vLLM
def test_each_of_two_real_engines_starts_once(run: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The large one stays from the pilot, by the sample and the rows that are asked again, to the last row."""
    stop_engines(run.spark, force=True)
    monkeypatch.setattr(cascade, "new_seed", lambda: SEED)
    monkeypatch.setattr(cascade, "pilot_share", lambda rows: 40 / rows)
    monkeypatch.setattr(cascade_repeats, "_MAX_SHARE", 0.05)
    table = run.spark.read.parquet(str(EXAMPLES / "data" / "debian_packages.parquet"))
    table.orderBy("package").limit(_ROWS).write.parquet(run.defaults.input)
    run.defaults = replace(
        run.defaults,
        id_columns=("package",),
        source=PromptSource(template="Package: {package}\nSummary: {summary}\nDescription: {description}"),
        generation=GenerationSpec(
            max_tokens=24, response_format=(EXAMPLES / "section.schema.json").read_text()
        ),
        engine=engine("model"),
        cascade=engine("model-small"),
        engine_python=sys.executable,
        agree=0.8,
        summary=str(run.directory / "summary.json"),
    )
    summary = run_cascade(run)
    assert summary.complete
    assert len({row["package"] for row in run.rows()}) == len(run.rows()) == _ROWS
    assert loaded(run) == [str(EXAMPLES / "model-small"), str(EXAMPLES / "model")]
    facts = facts_of(run, "summary.json")
    assert facts["phases"].keys() >= {"small", "pilot_labels", "labels", "again_labels", "final"}
    assert facts["rows_kept"] > 100
    assert facts["asked_again"]["rows"] == 25
    assert facts["asked_again"]["same"] >= 23, "greedy, and batches of other rows change hardly an answer"
