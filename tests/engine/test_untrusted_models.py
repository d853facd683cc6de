"""What a directory of a stranger's model, or a stranger's schema, cannot do: run code, read other files, be fetched."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from pipemax.answers.validity import fault_of
from pipemax.api import OfflineEngine
from pipemax.config import EngineConfig
from pipemax.domain.errors import EngineStartError
from pipemax.generation import Sampling
from pipemax.serve.schema_checks import check_response_format
from tests.engine.conftest import DEFAULTS, DEMO_MODEL
from tests.engine.test_preflight import ask


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A file that the model's code would make."""
    return tmp_path / "code-has-run"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


CODE = "import pathlib; pathlib.Path({mark!r}).touch()\nfrom transformers import {base}\nclass Their({base}): {body}\n"


@pytest.mark.parametrize(
    ("file", "values", "base"),
    [
        (
            "config.json",
            {"model_type": "their", "auto_map": {"AutoConfig": "their.Their"}},
            "PretrainedConfig",
        ),
        (
            "tokenizer_config.json",
            {"tokenizer_class": "Their", "auto_map": {"AutoTokenizer": ["their.Their", None]}},
            "PreTrainedTokenizer",
        ),
    ],
)
def test_code_in_a_model_directory_runs_only_if_it_is_trusted(
    model: Path, mark: Path, file: str, values: dict[str, Any], base: str
) -> None:
    change(model / file, **values)
    (model / "their.py").write_text(CODE.format(mark=str(mark), base=base, body="model_type = 'their'"))
    assert "contains custom code" in ask({"model": str(model)}).error
    assert not mark.exists()
    ask({"model": str(model), "trust_remote_code": True})
    assert mark.exists(), "the code would have run"


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.system('touch ' ~ MARK) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{% include '/etc/passwd' %}",
        "{% for number in range(1000000000000) %}x{% endfor %}",
    ],
)
def test_a_chat_template_reaches_nothing_but_the_messages(model: Path, mark: Path, template: str) -> None:
    (model / "chat_template.jinja").write_text(template.replace("MARK", f"'{mark}'"))
    reply = ask({"model": str(model), "max_model_len": 512}, ["Package: hello"])
    assert "chat template refused the messages" in reply.first_prompt
    assert not mark.exists()


@pytest.mark.parametrize(
    ("change_it", "says"),
    [
        (lambda model: change(model / "config.json", num_hidden_layers=-1), "num_hidden_layers -1"),
        (lambda model: change(model / "config.json", num_hidden_layers="x"), "expected int, got str"),
        (lambda model: change(model / "config.json", num_attention_heads=0), "cannot be read"),
        (lambda model: (model / "config.json").write_text("[" * 100_000), "cannot be read"),
        (lambda model: (model / "tokenizer.json").write_text('{"a":' * 100_000), "cannot be read"),
    ],
)
def test_files_that_describe_no_model_are_refused_with_a_sentence(
    model: Path, change_it: Callable[[Path], object], says: str
) -> None:
    change_it(model)
    error = ask({"model": str(model)}).error
    assert says in error
    assert str(model) in error


class _Pickled:
    """Weights in the form that runs code as it is read."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._mark}",)


@pytest.mark.long  # an engine that fails takes as long to start as another
def test_pickled_weights_run_no_code(model: Path, mark: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(_Pickled(mark)))
    with pytest.raises(EngineStartError):
        OfflineEngine(EngineConfig.parse(DEFAULTS | {"policy": "vllm", "model": str(model)}))
    assert not mark.exists()


@pytest.fixture
def server() -> Any:
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            """Nothing is printed."""

    with HTTPServer(("127.0.0.1", 0), Handler) as started:
        Thread(target=started.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{started.server_port}", asked
        started.shutdown()


def schemas_that_refer_to(url: str) -> list[dict[str, Any]]:
    return [
        {"$ref": url},
        {"type": "object", "properties": {"a": {"items": {"$ref": url}}}},
        {"$id": url, "properties": {"a": {"$ref": "other.json"}}},
        {"mine": {"a": {"$ref": url}}, "$ref": "#/mine/a"},
        {"$dynamicRef": url},
    ]


def test_a_schema_refers_to_itself_only_and_nothing_is_fetched_or_read(server: Any, tmp_path: Path) -> None:
    url, asked = server
    secret = tmp_path / "secret.json"
    secret.write_text('{"const": "the content of a file"}')
    for source in (f"{url}/schema", secret.as_uri()):
        for schema in map(json.dumps, schemas_that_refer_to(source)):
            with pytest.raises(ValueError, match=r"refers to '.*', which is not in it"):
                check_response_format(schema)
            # A schema that came through no check, as that of an old table.
            fault = fault_of('{"a": [1]}', "stop", Sampling(response_format=schema))
            assert "the content of a file" not in str(fault)
    assert asked == []


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"n": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/n"}}},
        {"definitions": {"n": {"type": "integer"}}, "properties": {"a": {"$ref": "#/definitions/n"}}},
        {"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#"}}}},
    ],
)
def test_a_schema_may_refer_to_its_parts(schema: dict[str, Any]) -> None:
    check_response_format(json.dumps({"type": "object", **schema}))
