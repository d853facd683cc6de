"""Send requests to the addresses of an endpoint, and say what came of each. aiohttp carries them.

A key goes to its address and nowhere else: redirects to another host are refused, http is for loopback and private
addresses, and whatever a server says is rid of keys before anyone sees it.
"""

import json
import math
import socket
import ssl
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Self
from urllib.parse import quote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from pipemax.domain.errors import EngineStartError
from pipemax.endpoint_config import OPEN_NET, Address, EndpointConfig, is_public
from pipemax.endpoints.replies import said_in

_MAX_BODY_BYTES = 64 * 2**20
_CONNECT_S = 15.0
_KEEPALIVE_S = 4.0
"""Below the 5 s after which uvicorn closes an idle connection: one that is closed as it is used costs a try."""
_REFUSED_ROW = (400, 413, 422)
_REFUSED_RUN = (401, 403, 404)
_BUSY = (429, 503, 529)
_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_REDIRECTS = 3
_SURELY_A_KEY = 16
"""A text of so many characters that is equal to a key is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A good answer."""

    values: Any
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRefused:
    """The address refuses this request, and would again."""

    status: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """The address wants fewer requests."""

    retry_after_s: float | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """There is no answer, or one that cannot be read: the request may be sent again."""

    reason: str
    is_timeout: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRefused:
    """The address would refuse every request."""

    reason: str
    status: int | None = None


Outcome = Answered | RowRefused | Busy | Broken | RunRefused


class Client:
    """Requests to the addresses of one config. Make and use it on one event loop; ``async with`` closes it."""

    def __init__(self, config: EndpointConfig) -> None:
        """Raise ``EngineStartError`` for an address that may not be used, or certificates that cannot be read."""
        self._config = config
        self._secrets = written_forms(config.keys.values())
        self._headers = [config.headers_of(address) for address in config.endpoint]
        for address in config.endpoint:
            _check_reach(address)
        self._proxies = [_proxy_of(address) for address in config.endpoint]
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S, ssl=_tls(config)),
            timeout=aiohttp.ClientTimeout(total=config.timeout_s, sock_connect=_CONNECT_S),
            trust_env=False,  # it would also read passwords from ~/.netrc; proxies are found above
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, address: int, url: str) -> Outcome:
        """Return what came of a GET."""
        return await self._outcome("GET", address, url, None, {})

    async def post(
        self, address: int, url: str, values: dict[str, Any], *, key: str | None = None
    ) -> Outcome:
        """Return what came of a POST of JSON; ``key`` is the same for all tries of a request."""
        headers = {"Content-Type": "application/json"} | ({} if key is None else {"Idempotency-Key": key})
        return await self._outcome("POST", address, url, json.dumps(values).encode(), headers)

    def without_keys(self, text: str) -> str:
        """Return the text with every key replaced, also as JSON and URLs write it."""
        return _replaced(text, self._secrets)

    async def _outcome(
        self, method: str, address: int, url: str, body: bytes | None, headers: dict[str, str]
    ) -> Outcome:
        began_s = time.monotonic()
        try:
            status, sent, content = await self._send(method, address, url, body, headers)
        except _RedirectedError as error:
            return RunRefused(reason=str(error))
        except aiohttp.ClientConnectorCertificateError as error:
            return RunRefused(reason=_distrust(self._config, address, error))
        except TimeoutError:
            return Broken(reason=f"no answer within {time.monotonic() - began_s:.0f} s", is_timeout=True)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Broken(reason=self.without_keys(str(error) or type(error).__name__))
        if status == 200:
            try:
                # Short keys, such as EMPTY, may be words of an answer.
                values = json.loads(_replaced(content.decode(), self._secrets, min_length=_SURELY_A_KEY))
            except (ValueError, RecursionError) as error:
                return Broken(reason=f"its answer is no JSON: {error}")
            return Answered(values=values, latency_s=time.monotonic() - began_s)
        text = self.without_keys(content.decode(errors="replace"))
        said, _ = said_in(text)
        name = self._config.endpoint[address].name
        if status in _REFUSED_ROW:
            return RowRefused(status=status, text=text)
        if status in _REFUSED_RUN:
            return RunRefused(reason=_refusal(status, name, said, self._config), status=status)
        if status in _BUSY:
            return Busy(retry_after_s=retry_after_s(sent), reason=f"{status}: {said}")
        return Broken(reason=f"{status}: {said}", is_timeout=status in (408, 504))

    async def _send(
        self, method: str, address: int, url: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[int, str | None, bytes]:
        """Return status, ``Retry-After`` and body."""
        for _ in range(_MAX_REDIRECTS + 1):
            async with self._session.request(
                method,
                url,
                data=body,
                headers={**self._headers[address], **headers},
                proxy=self._proxies[address],
                allow_redirects=False,
            ) as response:
                if response.status not in _REDIRECTS:
                    return response.status, response.headers.get("Retry-After"), await _read(response)
                url = _redirected(url, response.headers.get("Location"))
        raise _RedirectedError(f"{self._config.endpoint[address].name} redirects without end")


class _RedirectedError(Exception):
    """A redirect that is not followed."""


def written_forms(keys: Collection[str]) -> list[str]:
    """Return the keys as they are, and as JSON and URLs write them, the longest first."""
    forms = {
        form
        for key in keys
        for form in (key, json.dumps(key)[1:-1], key.replace("/", "\\/"), quote(key, safe=""))
    }
    return sorted(forms, key=len, reverse=True)


def _replaced(text: str, secrets: Sequence[str], *, min_length: int = 0) -> str:
    for secret in secrets:
        if len(secret) >= min_length:
            text = text.replace(secret, "***")
    return text


def _redirected(url: str, location: str | None) -> str:
    target = urlsplit(urljoin(url, location or ""))
    source = urlsplit(url)
    if (target.scheme, target.netloc) != (source.scheme, source.netloc):
        raise _RedirectedError(
            f"{source.scheme}://{source.netloc} redirects to {target.scheme}://{target.netloc}, and keys and rows go "
            "only to the host that the engine config names; write the host there that is meant"
        )
    return target.geturl()


async def _read(response: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for part in response.content.iter_any():
        content += part
        if len(content) > _MAX_BODY_BYTES:
            raise ValueError(f"its answer is longer than {_MAX_BODY_BYTES:,} bytes")
    return bytes(content)


def _refusal(status: int, name: str, said: str, config: EndpointConfig) -> str:
    match status:
        case 401:
            what = f"refuses the key ({', '.join(config.variables) or 'none is named: api_key_env'})"
        case 403:
            what = f"forbids model {config.model!r}, or this account's or network's access to it"
        case _:
            what = f"has no model {config.model!r}, or no such API below the given URL"
    return f"endpoint {name} {what}: {status}, {said}"


def _distrust(config: EndpointConfig, address: int, error: aiohttp.ClientConnectorCertificateError) -> str:
    remedy = (
        "name the file of your company's own authority as ca_file"
        if config.ca_file is None
        else "see ca_file"
    )
    return (
        f"the certificate of endpoint {config.endpoint[address].name} is not trusted: {error.certificate_error}; "
        f"{remedy}"
    )


def retry_after_s(header: str | None, *, now: datetime | None = None) -> float | None:
    """Return the seconds that a ``Retry-After`` header asks for, which is a number or a date; None without."""
    if header is None:
        return None
    try:
        seconds = float(header)
        return max(0.0, seconds) if math.isfinite(seconds) else None
    except ValueError:
        pass
    try:
        until = parsedate_to_datetime(header)
    except ValueError:
        return None
    until = until if until.tzinfo is not None else until.replace(tzinfo=UTC)
    return max(0.0, (until - (now or datetime.now(UTC))).total_seconds())


def _tls(config: EndpointConfig) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if config.ca_file is not None:
        try:
            context.load_verify_locations(config.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise EngineStartError(f"ca_file {str(config.ca_file)!r} cannot be read: {error}") from None
    return context


def _check_reach(address: Address) -> None:
    """Raise ``EngineStartError`` for http to a host whose name leads into the open net."""
    parts = urlsplit(address.url)
    if parts.scheme != "http":
        return
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
    except OSError:
        if _proxy_of(address) is None:
            return  # nothing can be sent there
        raise EngineStartError(
            f"endpoint {address.name} {OPEN_NET.format(host=f'{parts.hostname}, which only the proxy knows,')}"
        ) from None
    for entry in found:
        place = str(entry[4][0]).partition("%")[0]
        if is_public(place):
            host = parts.hostname if parts.hostname == place else f"{parts.hostname} ({place})"
            raise EngineStartError(f"endpoint {address.name} {OPEN_NET.format(host=host)}")


def _proxy_of(address: Address) -> str | None:
    """Return the proxy that the usual variables name for the address."""
    parts = urlsplit(address.url)
    if proxy_bypass(parts.hostname or ""):
        return None
    return getproxies().get(parts.scheme) or getproxies().get("all")
