"""A key that stands in an endpoint's config is refused, and no text of ours has one."""

import json
from typing import Any

import pytest

from pipemax.endpoint_config import EndpointConfig
from pipemax.endpoint_keys import secret_variables
from pipemax.endpoints.client import written_forms
from pipemax.wire import GenerationSpec, ProcessIdentity, SessionHeader

KEY = "sk-canary-0123456789"
VALUES = {"endpoint": "https://host/v1", "model": "m", "model_revision": "1"}
HEADERS = [
    {"Authorization": f"Bearer {KEY}"},
    {"api-key": KEY},
    {"api-key": f"{KEY}${{EMPTY}}"},
    {"X-Custom": f"Bearer {KEY}"},
    {"X-Custom": KEY},
]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        *[({"headers": headers}, r"headers: .*\$\{NAME\}") for headers in HEADERS],
        *[({"endpoint": [{"url": "https://host/v1", "headers": one}]}, r"\$\{NAME\}") for one in HEADERS],
        ({"headers": {"X-Tag": [KEY]}}, "headers.X-Tag"),
        ({"api_key_env": KEY}, "is no name of an environment variable in capitals"),
        ({"api_key_env": [KEY]}, "api_key_env"),
        ({"api_key": KEY}, "unknown field 'api_key'.*api_key_env"),
        ({"endpoint": [{"url": "https://host/v1", "api_key": KEY}]}, "unknown field 'endpoint.0.api_key'"),
        ({"endpoint": f"https://user:{KEY}@host/v1"}, "holds a user or a password"),
        ({"endpoint": f"https://{KEY}@host/v1"}, "holds a user or a password"),
        ({"endpoint": f"https://host/v1?api-key={KEY}"}, "'api-key' in its query"),
        ({"endpoint": f"https://host/v1?code={KEY}"}, "'code' in its query"),
        ({"endpoint": f"https://host/v1#{KEY}"}, "has a fragment"),
        ({"endpoint": f"https://host:{KEY}/v1"}, "has a port that is no number"),
        ({"endpoint": f"ftp://{KEY}/v1"}, "is no http"),
        ({"endpoint": {"url": f"{KEY}://host"}}, "is no http"),
        ({"extra_body": {"api_key": KEY}}, "has a field 'api_key', which looks like a key"),
        ({"extra_body": {"provider": {"client-secret": KEY}}}, "has a field 'client-secret'"),
        ({"model": [KEY]}, "model"),
        ({"timeout_s": -1}, r"timeout_s: .*\(got -1\)"),
    ],
)
def test_a_key_in_the_config_is_refused_and_not_repeated(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told) as refused:
        EndpointConfig.parse({**VALUES, **values})
    assert KEY not in str(refused.value)


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer ${TOKEN}"},
        {"Authorization": "Token token=${TOKEN}"},
        {"api-key": "${TOKEN}"},
        {"Ocp-Apim-Subscription-Key": "${TOKEN}", "X-Tenant": "research"},
    ],
)
def test_headers_that_name_a_variable_get_its_value_for_requests_only(headers: dict[str, str]) -> None:
    values = {**VALUES, "headers": headers}
    assert secret_variables(values) == ("TOKEN",)
    config = EndpointConfig.parse(values).with_keys({"TOKEN": f" {KEY}\n", "OTHER": "x"})
    sent = config.headers_of(config.endpoint[0])
    assert any(KEY in text for text in sent.values())
    assert dict(config.keys) == {"TOKEN": KEY}
    for text in (repr(config), str(config), json.dumps(config.model_dump(mode="json")), config.engine_id()):
        assert KEY not in text
    assert config.engine_id() == EndpointConfig.parse(values).engine_id()


def test_an_address_has_a_key_of_its_own_before_the_common_one() -> None:
    addresses = [{"url": "https://a/v1"}, {"url": "https://b/v1", "api_key_env": "B"}]
    config = EndpointConfig.parse({**VALUES, "endpoint": addresses, "api_key_env": "A"})
    config = config.with_keys({"A": "key-a", "B": "key-b"})
    sent = [config.headers_of(address)["Authorization"] for address in config.endpoint]
    assert sent == ["Bearer key-a", "Bearer key-b"]


def test_a_session_s_header_shows_no_key() -> None:
    header = SessionHeader(
        job_id="j",
        task="t",
        daemon=ProcessIdentity.of_this_process(),
        engine=VALUES,
        generation=GenerationSpec(),
        keys={"TOKEN": KEY},
    )
    assert KEY not in repr(header)
    assert SessionHeader.from_bytes(header.to_bytes()).keys == {"TOKEN": KEY}


def test_a_key_is_known_in_the_forms_of_json_and_of_urls() -> None:
    assert set(written_forms(['a/b+c="d'])) == {'a/b+c="d', 'a/b+c=\\"d', 'a\\/b+c="d', "a%2Fb%2Bc%3D%22d"}
