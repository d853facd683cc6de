"""``pipemax tune``: the same rows by one engine after the other, none of which stays."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pipemax.wire import GenerationSpec
from pipemax_spark.cli import tune_app
from pipemax_spark.errors import JobError
from pipemax_spark.job.trial import TrialOptions
from pipemax_spark.job.tune import run_tuning
from pipemax_spark.request.prompts import PromptSource
from tests.fakes.engine_python import write_engine_python
from tests.fakes.settings import fake_config
from tests.spark.conftest import Jobs
from tests.spark.processes import servers_of
from tests.spark.test_two_environments import MODEL


def tuned(run: Jobs, **changes: Any) -> str:
    """Return what a tuning printed; its engines have ended by then."""
    run.write_input([(f"package {i}",) for i in range(12)], "text string")
    options = replace(
        run.defaults,
        output="",
        source=changes.pop("source", PromptSource(template="Package: {text}")),
        generation=GenerationSpec(max_tokens=8),
        **changes,
    )
    with run.terminal() as terminal:
        run_tuning(run.spark, TrialOptions(job=options, rows=10, once=True), terminal)
    return run.printed


def test_a_setting_is_measured_between_two_engines_without_it(run: Jobs, tmp_path: Path) -> None:
    python = write_engine_python(tmp_path / "python")
    engine = fake_config() | {"kv_cache_dtype": "auto", "quantization": "gptq"}
    printed = tuned(run, engine=engine, engine_python=python)
    assert printed.count("Engine   loaded") == 3
    assert re.search(
        r"^vllm: \{speculative_config: .* 100\.0% \(72\.2% to 100\.0%\) of 10$", printed, re.MULTILINE
    )
    assert re.search(r"^\(none, again\) .* 100\.0% \(72\.2% to 100\.0%\) of 10$", printed, re.MULTILINE)
    assert not servers_of(python)


def test_a_wrong_prompt_is_refused_before_an_engine_starts(run: Jobs) -> None:
    source = PromptSource(template="{txt}")
    with pytest.raises(JobError, match="no column 'txt'"):
        tuned(run, engine=fake_config(), source=source)


@pytest.mark.long  # five engines of vLLM
def test_vllm_on_cpus_has_fp8_kv_and_speculation(run: Jobs) -> None:
    engine = {"model": str(MODEL), "max_model_len": 512, "max_num_seqs": 16, "cpu_kv_gib": 0.0625}
    printed = tuned(run, engine=engine, engine_python=None)
    rates = dict(re.findall(r"^(\S.*?)  +(\d+\.\d) ", printed, re.MULTILINE))
    assert {"kv_cache_dtype: fp8", "(none, again)"} <= rates.keys()
    assert any("speculative_config" in line for line in rates)


def test_help_names_its_rows_and_leaves_out_what_is_about_the_output() -> None:
    shown = CliRunner().invoke(tune_app, ["--help"], env={"COLUMNS": "80"}).output.split()
    assert {"--rows", "--template", "--engine-python"} <= set(shown)
    assert not {"--output", "--once", "--incremental"} & set(shown)
