"""To which servers keys and rows go, by which way, and to which they do not."""

import asyncio
import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from pipemax.domain.errors import EngineStartError
from pipemax.endpoint_config import EndpointConfig
from pipemax.endpoints.client import Answered, Client, Outcome, RunRefused
from tests.endpoints.keys_server import Authority, KeysServer, keys_server, proxy_server

KEY = "sk-canary/of+this=test"
LOOPBACK = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def secure(authority: Authority) -> Iterator[KeysServer]:
    with keys_server(KEY, certificate=authority.certificate(LOOPBACK)) as server:
        yield server


def asked(values: dict[str, Any], path: str = "models") -> Outcome:
    """What comes of a GET to the config's address."""
    config = EndpointConfig.parse({"api_key_env": "KEY", **values}).with_keys({"KEY": KEY})

    async def ask() -> Outcome:
        async with Client(config) as client:
            return await client.get(0, config.endpoint[0].url_of(path))

    return asyncio.run(ask())


def test_a_company_s_own_authority_is_believed_only_if_its_certificate_is_named(
    secure: KeysServer, authority: Authority
) -> None:
    outcome = asked(secure.config())
    assert isinstance(outcome, RunRefused)
    assert f"the certificate of endpoint https://127.0.0.1:{secure.port} is not trusted: " in outcome.reason
    assert outcome.reason.endswith("name the file of your company's own authority as ca_file")
    assert secure.seen == [], "nothing was sent"
    assert isinstance(asked(secure.config(ca_file=str(authority.ca_file))), Answered)
    assert secure.headers_with(f"Bearer {KEY}") == 1


def test_a_certificate_of_another_name_is_refused(authority: Authority) -> None:
    with keys_server(KEY, certificate=authority.certificate(x509.DNSName("other.example"))) as server:
        outcome = asked(server.config(ca_file=str(authority.ca_file)))
        assert isinstance(outcome, RunRefused)
        assert "IP address mismatch" in outcome.reason
        assert server.seen == []


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_file_without_certificates_ends_the_start(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "authority.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(EngineStartError, match=r"ca_file '.*authority\.pem' cannot be read"):
        asked(
            {"endpoint": "https://127.0.0.1:9/v1", "model": "m", "unpinned_model": True, "ca_file": str(path)}
        )


def test_a_redirect_to_another_host_is_refused_and_the_key_stays() -> None:
    with keys_server(KEY) as server, keys_server(KEY) as other:
        server.redirects["/v1/models"] = other.url + "/models"
        outcome = asked(server.config())
        assert isinstance(outcome, RunRefused)
        assert (
            f"redirects to http://127.0.0.1:{other.port}, and keys and rows go only to the host"
            in outcome.reason
        )
        assert other.seen == []


def test_a_redirect_from_https_to_http_is_refused(secure: KeysServer, authority: Authority) -> None:
    secure.redirects["/v1/plain"] = f"http://127.0.0.1:{secure.port}/v1/models"
    outcome = asked(secure.config(ca_file=str(authority.ca_file)), "plain")
    assert isinstance(outcome, RunRefused)
    assert "redirects to http://" in outcome.reason


def test_a_redirect_on_the_same_host_is_followed() -> None:
    with keys_server(KEY) as server:
        server.redirects["/v1/old"] = "/v1/models"
        assert isinstance(asked(server.config(), "old"), Answered)
        assert [path for path, _ in server.seen] == ["/v1/old", "/v1/models"]
        assert server.headers_with(KEY) == 2
        server.redirects["/v1/round"] = "/v1/round"
        outcome = asked(server.config(), "round")
        assert isinstance(outcome, RunRefused)
        assert "redirects without end" in outcome.reason


def test_a_tunnel_through_the_usual_proxy_keeps_the_certificate_checked(
    secure: KeysServer, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    with proxy_server(secure.port) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        values = secure.config(ca_file=str(authority.ca_file))
        assert isinstance(asked(values), Answered)
        assert proxy.passed == [f"CONNECT 127.0.0.1:{secure.port}"]
        elsewhere = asked({**values, "endpoint": "https://host.example/v1"})
        assert isinstance(elsewhere, RunRefused), "the proxy cannot pose as the host"
        assert "Hostname mismatch" in elsewhere.reason
        assert len(proxy.passed) == 2
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        assert isinstance(asked(values), Answered)
        assert len(proxy.passed) == 2


def test_http_goes_through_its_proxy_and_not_where_no_proxy_names_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with keys_server(KEY) as server, proxy_server(server.port) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        assert isinstance(asked(server.config()), Answered)
        assert proxy.passed == [f"{server.url}/models"]
        monkeypatch.setenv("NO_PROXY", "localhost,127.0.0.1")
        assert isinstance(asked(server.config()), Answered)
        assert len(proxy.passed) == 1


@pytest.mark.parametrize("host", ["8.8.8.8", "[2001:4860:4860::8888]", "[::ffff:8.8.8.8]"])
def test_http_to_a_public_address_is_refused_in_the_config(host: str) -> None:
    with pytest.raises(ValueError, match=r"over the open net: .* use https"):
        EndpointConfig.parse({"endpoint": f"http://{host}/v1", "model": "m", "unpinned_model": True})


@pytest.mark.parametrize("name", ["134744072", "0x08.0x08.0x08.0x08"])
def test_http_to_a_name_of_a_public_address_is_refused_before_anything_is_sent(name: str) -> None:
    """These names mean 8.8.8.8 without any server of names."""
    with pytest.raises(EngineStartError, match=rf"{name} \(8\.8\.8\.8\) is neither; use https"):
        asked({"endpoint": f"http://{name}/v1", "model": "m", "unpinned_model": True})


def test_http_to_a_name_that_only_a_proxy_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with pytest.raises(EngineStartError, match=r"which only the proxy knows, is neither; use https"):
        asked({"endpoint": "http://no-such-host.invalid/v1", "model": "m", "unpinned_model": True})
