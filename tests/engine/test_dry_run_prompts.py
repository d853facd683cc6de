"""What the preflight makes of sampled rows and of a system message: what the engine would get."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from pipemax.serve.preflight_checks import preflight
from pipemax.wire import GenerationSpec, PreflightReply, PreflightRequest
from tests.engine.conftest import DEMO_MODEL


def asked_of(model: Path, rows: list[dict[str, Any]] | None = None, **generation: Any) -> PreflightReply:
    return preflight(
        PreflightRequest(
            engine={"model": str(model)}, generation=GenerationSpec(**generation), requests=rows or []
        )
    )


def test_a_dry_run_counts_and_shows_what_the_engine_gets() -> None:
    turns = [
        {"role": "user", "content": "Package: hello"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "parts": [{"text": "And"}, {"text": "now?"}, {"image": {"source": "image"}}]},
    ]
    rows: list[dict[str, Any]] = [
        {"messages": turns},
        {"messages": turns, "overrides": {"max_tokens": 3}},
        {"messages": [{**turns[0], "fields": '{"name": "Ada"}'}]},
        {"fault": {"code": "invalid_parameter", "message": "max_tokens is 'n/a'"}},
    ]
    reply = asked_of(DEMO_MODEL, rows, system="Be brief.", max_tokens=8, n=2, temperature=0.5)
    assert not reply.error
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    chat = [
        {"role": "system", "content": "Be brief."},
        *turns[:2],
        {"role": "user", "content": "And\nnow?"},
    ]
    expected = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert reply.first_prompt == expected
    tokens = len(tokenizer.encode(expected, add_special_tokens=False))
    assert reply.prompt_tokens == [tokens, tokens, 0, 0]
    assert reply.shared_prefix_tokens == tokens, "of those that are no errors"
    assert reply.output_tokens == [16, 6, 0, 0]


@pytest.mark.parametrize(
    ("system", "says"),
    [
        ("{{ raise_exception('no system here') }}", "no system here"),
        ("", "leaves it out"),
        ("{{ message.content }}", None),
    ],
)
def test_a_system_message_that_the_template_does_not_take_is_refused(
    tmp_path: Path, system: str, says: str | None
) -> None:
    model = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    (model / "chat_template.jinja").write_text(
        "{% for message in messages %}{% if message.role == 'system' %}"
        + system
        + "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    )
    reply = asked_of(model, system="Be brief.")
    assert (says in reply.error) if says else not reply.error
    assert asked_of(model).error == ""
