"""OpenAI's batch files as input and output of the job."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipemax.generation import Sampling
from pipemax.serve.rows.arrow_rows import requests_of
from pipemax_spark.errors import JobError
from pipemax_spark.executor.conversations import FIELDS
from pipemax_spark.executor.requests import request_batch
from pipemax_spark.job.arguments import job_options
from pipemax_spark.options import JobOptions
from pipemax_spark.storage.openai_batch import read_requests
from tests.fakes.settings import expected_text, fake_config
from tests.spark.conftest import Jobs


def write_requests(path: Path, *bodies: dict[str, Any], url: str = "/v1/chat/completions") -> None:
    lines = [
        {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}
        for number, body in enumerate(bodies)
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")


def chat(text: str, **settings: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **settings}


def options_of(run: Jobs, path: Path, **values: Any) -> JobOptions:
    return replace(
        job_options(
            {
                "input": str(path),
                "input_format": "openai-batch",
                "output": run.output,
                "batch_output": str(path.parent / "answers.jsonl"),
                "engine": fake_config(),
                "engine_python": run.defaults.engine_python,
                "mlflow_experiment": "",
                **values,
            },
            log_dir=run.directory / "logs",
        )
    )


def lines_of(path: Path) -> dict[str, dict[str, Any]]:
    return {line["custom_id"]: line["response"] for line in map(json.loads, path.read_text().splitlines())}


def test_requests_of_a_file_are_answered_in_a_file_once_all_are_done(run: Jobs, tmp_path: Path) -> None:
    requests, answers = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    write_requests(
        requests, chat("one two three"), chat("four five", max_tokens=2), chat(" "), chat("[[error]]")
    )
    run.defaults = options_of(run, requests)
    run.run(limit=2)
    assert not answers.exists(), "two rows are left"
    run.run()
    good, bad = lines_of(answers), lines_of(tmp_path / "answers.errors.jsonl")
    texts = {name: line["body"]["choices"][0]["message"]["content"] for name, line in good.items()}
    assert texts == {"r0": expected_text("one two three"), "r1": expected_text("four five", 2)}
    assert good["r1"]["body"]["choices"][0]["finish_reason"] == "length"
    assert {name: line["body"]["error"]["code"] for name, line in bad.items()} == {
        "r2": "empty_prompt",
        "r3": "engine_error",
    }


def test_what_a_request_holds_is_its_row_s_error_and_never_ends_the_job(run: Jobs, tmp_path: Path) -> None:
    requests = tmp_path / "requests.jsonl"
    write_requests(
        requests,
        chat("fine"),
        chat("half of a pair: \ud83c"),
        chat("a", max_tokens=2_147_483_648),
        chat("a", max_tokens="4.0"),
        chat("DEEP"),
        chat("BYTE"),
        chat("a", stop=""),
        chat("a", logit_bias={}, tool_choice="none"),
    )
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tools = {"custom_id": "tools", "body": {"messages": [{"role": "assistant", "tool_calls": [call]}]}}
    content = requests.read_bytes().replace(b'"DEEP"', b"[" * 20_000).replace(b"BYTE", b"\xff")
    requests.write_bytes(content + json.dumps(tools).encode() + b"\n")
    run.defaults = options_of(run, requests)
    run.run()
    rows = {row["custom_id"]: row for row in run.rows()}
    errors = {name: row["annotation"]["error"] for name, row in rows.items()}
    assert {name: error["code"] for name, error in errors.items() if error is not None} == {
        "r2": "invalid_parameter",
        "r4": "invalid_prompt",
        "r5": "invalid_prompt",
        "r6": "invalid_parameter",
        "tools": "empty_prompt",  # the fake reads no fields
    }
    assert rows["r1"]["annotation"]["text"] == expected_text("half of a pair: ?", 16)
    assert json.loads(rows["tools"]["messages"][0][FIELDS]) == {"tool_calls": [call]}
    bad = lines_of(tmp_path / "answers.errors.jsonl")
    assert "max_tokens is 2147483648" in bad["r2"]["body"]["error"]["message"]


def test_a_request_is_the_same_alone_and_beside_any_other(spark: Any, tmp_path: Path) -> None:
    texts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    image = [{"type": "image_url", "image_url": {"url": "data:,x"}}]
    beside: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": image}]},
        {"messages": [{"role": "user", "content": "x", "name": "Ada"}]},
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": "n/a"},
        {"messages": [{"role": "user", "content": "\ud83c"}]},
    ]
    found = []
    for number, others in enumerate([[], *([other] for other in beside), beside]):
        path = tmp_path / f"{number}.jsonl"
        write_requests(path, {"messages": [{"role": "user", "content": texts}]}, *others)
        rows = read_requests(spark, str(path)).rows.where("custom_id = 'r0'").toArrow().combine_chunks()
        columns = {name: rows.column(name).chunk(0) for name in ("messages", "overrides")}
        batch = request_batch(0, 1, **columns)
        ((request,), faults) = requests_of(batch, job=Sampling(seed=1), system=None, id_prefix="")
        assert faults == []
        found.append(request)
    assert [message.content for message in found[0].messages or ()] == ["one\ntwo"]
    assert all(request == found[0] for request in found)


def test_a_request_that_cannot_be_a_row_is_named_before_anything_runs(run: Jobs, tmp_path: Path) -> None:
    requests = tmp_path / "requests.jsonl"
    write_requests(requests, chat("one"), chat("two", n=3))
    plain, run.defaults = run.defaults, options_of(run, requests)
    with pytest.raises(JobError, match="request 'r1': n is 3"):
        run.run()
    run.write_input([(1, "x")])
    with pytest.raises(JobError, match="--batch-output needs the column 'custom_id'"):
        run.run(
            **{name: getattr(plain, name) for name in ("input", "source")},
            input_format=None,
            id_columns=("id",),
            overrides_column=None,
        )
