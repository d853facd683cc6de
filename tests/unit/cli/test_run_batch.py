"""OpenAI's batch files: what becomes of each line, and of a run that was interrupted."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from pipemax.cli.batch_file import BatchLine, answer_of, read_done, read_ids, read_lines
from pipemax.cli.common import engine_config
from pipemax.cli.run_batch import answer_all
from pipemax.generation import Completion, GenerationRequest, Image, RequestError


def line(custom_id: str, *, url: str = "/v1/chat/completions", **body: Any) -> str:
    body = body or {"messages": [{"role": "user", "content": "Hi"}]}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


def lines(*texts: str) -> list[BatchLine]:
    return list(read_lines(io.StringIO("".join(texts)), done=set()))


class EchoEngine:
    """Answers each request with what it was asked, a few at a time."""

    def __init__(self) -> None:
        self.waiting: list[GenerationRequest] = []
        self.most_waiting = 0
        self.is_open = False

    def submit(self, requests: list[GenerationRequest]) -> None:
        self.waiting += requests
        self.most_waiting = max(self.most_waiting, len(self.waiting))

    def poll(self, timeout_s: float) -> list[Completion]:
        ended, self.waiting = self.waiting[:3], self.waiting[3:]
        return [
            Completion(request_id=each.request_id, text=str(each.prompt), finish_reason="stop")
            for each in ended
        ]

    def set_input_open(self, is_open: bool) -> None:
        self.is_open = is_open


def test_a_chat_request_becomes_one_of_ours_with_openai_s_defaults() -> None:
    text = line(
        "a",
        messages=[
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
        ],
        max_completion_tokens=7,
        stop="\n",
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        user="somebody",
        stream=False,
    )
    (read,) = lines(text)
    assert read.request is not None, read.fault
    assert [message.content for message in read.request.messages or ()] == ["Be short.", "H\ni"]
    sampling = read.request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.stop) == (7, 1.0, ("\n",))
    assert json.loads(sampling.response_format or "") == {"type": "object"}


def test_empty_settings_are_as_if_they_were_left_out() -> None:
    said, unsaid = lines(
        line("a", messages=[{"role": "user", "content": "x"}], chat_template_kwargs={}, choice=[]),
        line("a", messages=[{"role": "user", "content": "x"}]),
    )
    assert said.request is not None
    assert said.request == unsaid.request


def test_parts_may_be_images() -> None:
    shown = {"type": "image_url", "image_url": {"url": "data:,x"}}
    (read,) = lines(line("a", messages=[{"role": "user", "content": [{"type": "text", "text": "H"}, shown]}]))
    assert read.request is not None, read.fault
    (message,) = read.request.messages or ()
    assert message.content == ("H", Image(source="data:,x"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (line("a", url="/v1/images"), "url is '/v1/images'"),
        (line("a", messages=[]), "messages must be a list"),
        (
            line("a", messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
            "texts and image_urls are supported",
        ),
        (line("a", url="/v1/completions", prompt=["x", "y"]), "prompt must be one text"),
        (line("a", messages=[{"role": "user", "content": "x"}], tools=[{"type": "function"}]), "'tools'"),
        (
            line("a", messages=[{"role": "user", "content": "x"}], frobnicate=1),
            "'frobnicate' is not supported",
        ),
        (line("a", messages=[{"role": "user", "content": "x"}], temperature=9), "temperature is 9"),
        (line("a", messages=[{"role": "user", "content": "x"}], max_tokens="many"), "max_tokens is 'many'"),
        (line("a", messages=[{"role": "user", "content": "x"}], choice="yes"), "choice is 'yes', not a list"),
        ('{"custom_id": "a"}\n', "body is missing"),
    ],
)
def test_a_line_that_cannot_be_a_request_says_why(text: str, reason: str) -> None:
    (read,) = lines(text)
    assert read.request is None
    assert reason in read.fault


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("not json\n", "line 1 is not a JSON object"),
        (line("a") + "\n" + line("a"), "custom_id 'a' is on lines 1 and 3"),
        ('{"custom_id": 5}\n', "line 1: custom_id is 5"),
    ],
)
def test_a_file_whose_ids_are_wrong_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_ids(io.StringIO(text))


def test_each_request_is_answered_once_and_faults_end_nothing(tmp_path: Path) -> None:
    engine, answers = EchoEngine(), io.StringIO()
    texts = [line(f"r{i}", url="/v1/completions", prompt=f"p{i}") for i in range(9_000)]
    texts.insert(5, line("bad", frobnicate=1))
    failed = answer_all(engine, iter(lines(*texts)), answers, model="m")
    written = [json.loads(text) for text in answers.getvalue().splitlines()]
    assert failed == 1
    assert len({each["custom_id"] for each in written}) == len(written) == 9_001
    bodies = {each["custom_id"]: each["response"] for each in written}
    assert bodies["r8999"]["body"]["choices"][0]["text"] == "p8999"
    assert bodies["bad"]["status_code"] == 400
    assert engine.most_waiting <= 4096
    assert not engine.is_open


def test_a_rerun_answers_what_is_left_and_what_failed(tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    good = answer_of(BatchLine(custom_id="a"), Completion(request_id="a", text="x"), model="m", created_s=1)
    error = RequestError(code="engine_error", message="no")
    bad = answer_of(BatchLine(custom_id="b"), Completion(request_id="b", error=error), model="m", created_s=1)
    assert bad["response"]["status_code"] == 500
    whole = json.dumps(good) + "\n" + json.dumps(bad) + "\n"
    output.write_text(whole + json.dumps(good)[:20])
    assert read_done(output) == {"a"}
    assert output.read_text() == whole, "the torn line is cut off"
    left = list(read_lines(io.StringIO(line("a") + line("b") + line("c")), done={"a"}))
    assert [each.custom_id for each in left] == ["b", "c"]


def test_samples_are_choices() -> None:
    completion = Completion(
        request_id="a", text="x", samples=("x", None, "y"), reasoning="hm", completion_tokens=4
    )
    body = answer_of(BatchLine(custom_id="a"), completion, model="m", created_s=1)["response"]["body"]
    assert [each["message"]["content"] for each in body["choices"]] == ["x", "y"]
    assert body["choices"][0]["message"]["reasoning_content"] == "hm"


def test_an_engine_config_for_a_pooling_task_is_refused(tmp_path: Path) -> None:
    (tmp_path / "engine.yaml").write_text("model: m\ntask: embed\n")
    with pytest.raises(
        ValueError, match="this command is for generation, and the engine config's task is embed"
    ):
        engine_config(None, tmp_path / "engine.yaml")
