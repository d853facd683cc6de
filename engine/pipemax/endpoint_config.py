"""EndpointConfig: an engine whose model somebody else serves, at one or several OpenAI-compatible addresses.

An engine config with the key ``endpoint`` is one. It never holds a key: keys are in environment variables that it names
and reach the engine apart from it (``with_keys``).
"""

import hashlib
import ipaddress
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import parse_qsl, urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from pipemax.config import ChatMode, EngineConfig, ImageConfig, readable
from pipemax.endpoint_keys import (
    VARIABLE,
    checked_headers,
    checked_variable,
    secret_field,
    secret_variables,
)

_SECRET_QUERY = re.compile(r"key|token|secret|sig|password|code", re.IGNORECASE)
_SHOWN_FIELDS = (
    *(
        "task",
        "chat",
        "reasoning_parser",
        "max_concurrency",
        "max_requests_per_minute",
        "max_tokens_per_minute",
    ),
    *("timeout_s", "give_up_after_s", "max_tries", "metrics_port", "ca_file"),
)
"""Fields whose wrong values an error may name: no key is ever written there by mistake."""
_DEFAULT_CONCURRENCY = 512
OPEN_NET = (
    "would send keys and rows over the open net: http is for loopback and private addresses, and {host} is neither; "
    "use https"
)


class Address(BaseModel):
    """One address of the endpoint, with what differs from the config's common values."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(description="The API's root, such as https://host/v1.")
    api_key_env: str | None = Field(None, description="Environment variable with this address's key.")
    headers: dict[str, str] = Field(default_factory=dict, description="Further headers of this address.")

    @field_validator("url")
    @classmethod
    def _is_safe(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("is no http(s) URL; give the API's root, such as https://host/v1")
        if parts.username is not None or parts.password is not None:
            raise ValueError("holds a user or a password; name the key's variable by api_key_env")
        try:
            _ = parts.port
        except ValueError:
            raise ValueError("has a port that is no number from 0 to 65535") from None
        if parts.fragment:
            raise ValueError("has a fragment (#…); leave it out")
        if secret := next((name for name, _ in parse_qsl(parts.query) if _SECRET_QUERY.search(name)), None):
            raise ValueError(
                f"has {secret!r} in its query, where keys are logged; use api_key_env or headers"
            )
        if parts.scheme == "http" and is_public(parts.hostname):
            raise ValueError(OPEN_NET.format(host=parts.hostname))
        return url

    @field_validator("api_key_env")
    @classmethod
    def _names_a_variable(cls, name: str | None) -> str | None:
        return checked_variable(name)

    @field_validator("headers")
    @classmethod
    def _secrets_are_named(cls, headers: dict[str, str]) -> dict[str, str]:
        return checked_headers(headers)

    @property
    def name(self) -> str:
        """Scheme, host and port, for messages."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}"

    def url_of(self, path: str) -> str:
        """Return the URL of a path below the API's root; the root's query is kept."""
        parts = urlsplit(self.url)
        return parts._replace(path=f"{parts.path.rstrip('/')}/{path}").geturl()

    def server_url_of(self, path: str) -> str:
        """Return the URL of a path beside the API's root, where vLLM and llama.cpp have some of theirs."""
        parts = urlsplit(self.url)
        root = parts.path.rstrip("/").removesuffix("/v1")
        return parts._replace(path=f"{root}/{path}").geturl()


class ServerFacts(BaseModel):
    """What the addresses serve and can, as the check before a job found it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["vllm", "llama.cpp", "other"] = Field("other", description="Whose server it is.")
    models: tuple[dict[str, Any], ...] = Field((), description="What /models says: id, root, max_model_len.")
    answers_as: str | None = Field(None, description="The model that answers name.")
    schema_by: Literal["response_format", "json_object", "structured_outputs", "none"] = Field(
        "response_format", description="How a JSON schema is asked for."
    )
    choice_by: Literal["structured_outputs", "guided_choice", "schema", "none"] = Field(
        "schema", description="How a choice is asked for."
    )
    pattern_by: Literal["structured_outputs", "guided", "grammar", "none"] = Field(
        "none", description="How a regular expression or a grammar is asked for."
    )
    max_tokens_name: Literal["max_tokens", "max_completion_tokens"] = Field(
        "max_tokens", description="How the server calls the maximum of output tokens."
    )
    tokenize_by: Literal["messages", "content", "none"] = Field(
        "none", description="What its /tokenize takes: messages or a prompt (vLLM), or content (llama.cpp)."
    )


class EndpointConfig(BaseModel):
    """An engine that sends rows to a server. Two with equal ``engine_id`` are interchangeable."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: tuple[Address, ...] = Field(
        min_length=1,
        description="Root of an OpenAI-compatible API, such as https://host/v1; or a list of roots, or of url, "
        "api_key_env and headers, which share the rows and must serve the same model.",
    )
    model: str = Field(description="The model's id at the endpoint.")
    model_revision: str | None = Field(
        None,
        description="Your name for the version that is served, such as a date: part of the job's spec, because a "
        "server's model can change unseen.",
    )
    unpinned_model: bool = Field(
        False,
        description="Do without model_revision: answers of whatever is served count as interchangeable.",
    )
    api_key_env: str | None = Field(
        None, description="Environment variable of the executors with the key, sent as a bearer token."
    )
    headers: dict[str, str] = Field(
        default_factory=dict, description="Further headers; ${NAME} stands for an environment variable."
    )
    ca_file: Path | None = Field(
        None, description="PEM file with the certificates of your company's own authority."
    )
    task: Literal["generate", "embed", "classify", "score"] = Field(
        "generate", description="generate, embed, classify or score; a job sets it (--task)."
    )
    chat: ChatMode = Field(
        ChatMode.AUTO,
        description="Which API plain prompts go to: auto and always, chat completions; never, completions.",
    )
    reasoning_parser: Literal["server", "think_tags"] | None = Field(
        None,
        description="Where the model's thinking is: server takes it from the answer's field (reasoning or "
        "reasoning_content), think_tags splits it off at </think>.",
    )
    extra_body: dict[str, Any] = Field(
        default_factory=dict, description="Further fields of each request; they are part of a job's spec."
    )
    max_concurrency: int = Field(
        _DEFAULT_CONCURRENCY,
        ge=1,
        description="Maximum requests of a job that are open at once at an address; fewer where it takes fewer.",
    )
    max_requests_per_minute: float | None = Field(
        None, gt=0, description="Maximum requests of a job a minute at an address."
    )
    max_tokens_per_minute: float | None = Field(
        None, gt=0, description="Maximum tokens of a job a minute at an address, prompts and outputs."
    )
    timeout_s: float = Field(
        600.0, gt=0, allow_inf_nan=False, description="Seconds for the answer to a request."
    )
    give_up_after_s: float = Field(
        1800.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds without any answer of any address after which the run ends, to be resumed.",
    )
    max_tries: int = Field(
        6,
        ge=1,
        description="Tries of a request that fails while the address answers others, before its row is an error.",
    )
    price_per_million_prompt_tokens: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="For --max-cost and the summary."
    )
    price_per_million_output_tokens: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="For --max-cost and the summary."
    )
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port at which an engine server serves its figures to Prometheus; 0, or where it is taken, a free "
        "one; default: none.",
    )
    executors: int = Field(1, ge=1, description="Executors that share the limits; the job sets it.")
    server: ServerFacts | None = Field(None, description="What the check found; the job sets it.")
    images: ImageConfig = Field(
        default_factory=lambda: ImageConfig.model_validate({}),
        description="Limits of images: bytes, pixels, number, directories, hosts of URLs.",
    )
    _keys: dict[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _lists_addresses(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "endpoint" not in values:
            return values
        named = values["endpoint"]
        listed = list(named) if isinstance(named, list | tuple) else [named]
        return values | {"endpoint": [{"url": one} if isinstance(one, str) else one for one in listed]}

    @field_validator("model")
    @classmethod
    def _model_is_named(cls, model: str) -> str:
        if not model.strip():
            raise ValueError("is empty; give the model's id at the endpoint")
        return model

    @field_validator("headers")
    @classmethod
    def _secrets_are_named(cls, headers: dict[str, str]) -> dict[str, str]:
        return checked_headers(headers)

    @field_validator("api_key_env")
    @classmethod
    def _names_a_variable(cls, name: str | None) -> str | None:
        return checked_variable(name)

    @field_validator("extra_body")
    @classmethod
    def _holds_no_secret(cls, fields: dict[str, Any]) -> dict[str, Any]:
        if (name := secret_field(fields)) is not None:
            raise ValueError(
                f"has a field {name!r}, which looks like a key and would be part of the job's spec; use api_key_env or "
                "headers"
            )
        return fields

    @model_validator(mode="after")
    def _version_is_known(self) -> Self:
        if self.model_revision is None and not self.unpinned_model:
            raise ValueError(
                "model_revision is missing: a server's model can change unseen, and rows of one spec must be "
                "interchangeable. Give your name for the version that is served (model_revision: '2026-11'), or take "
                "whatever is served (unpinned_model: true, --unpinned-model)"
            )
        return self

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """Validate parsed YAML or JSON. Raise ``ValueError`` with one readable line per fault, naming the field."""
        if of_engines := [
            name for name in EngineConfig.model_fields if name in values and name not in cls.model_fields
        ]:
            them = ("that", "it") if len(of_engines) == 1 else ("these", "them")
            hint = "; the name of your version is model_revision" if "revision" in of_engines else ""
            raise ValueError(
                f"{', '.join(of_engines)}: an endpoint's server decides {them[0]}; leave {them[1]} out{hint}"
            )
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ValueError(readable(error, known=cls, shows=_SHOWN_FIELDS.__contains__)) from None

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variables that hold its keys."""
        return secret_variables(self.model_dump(mode="json"))

    def with_keys(self, keys: Mapping[str, str]) -> Self:
        """Return the config with the values of its variables, which nothing prints or hashes.

        Raise ``ValueError`` that names a variable without a value.
        """
        for name in self.variables:
            if not keys.get(name):
                raise ValueError(
                    f"the environment variable {name} is not set on the executors, and the endpoint's key is read from "
                    "it; set it from your cluster's store of secrets"
                )
            if not keys[name].strip().isascii() or not keys[name].strip().isprintable():
                raise ValueError(
                    f"the environment variable {name} holds characters that no header may have, such as a line break; "
                    "the endpoint's key is read from it"
                )
        copy = self.model_copy()
        copy._keys = {name: keys[name].strip() for name in self.variables}
        return copy

    @property
    def keys(self) -> Mapping[str, str]:
        """The values of its variables, as ``with_keys`` was given them."""
        return self._keys

    def headers_of(self, address: Address) -> dict[str, str]:
        """Return the headers of a request to an address, with the keys in them."""
        headers = {**self.headers, **address.headers}
        sent = {
            name: VARIABLE.sub(lambda match: self._keys[match[1]], text) for name, text in headers.items()
        }
        key = address.api_key_env or self.api_key_env
        return sent if key is None else {"Authorization": f"Bearer {self._keys[key]}", **sent}

    @property
    def num_replicas(self) -> int:
        """One: addresses are no replicas."""
        return 1

    @property
    def max_num_seqs(self) -> int:
        """The maximum of open requests of this executor."""
        return self.concurrency_of_address * len(self.endpoint)

    @property
    def concurrency_of_address(self) -> int:
        """This executor's part of ``max_concurrency``."""
        return max(1, self.max_concurrency // self.executors)

    @property
    def is_pooling(self) -> bool:
        """Whether the task generates nothing."""
        return self.task != "generate"

    def engine_id(self) -> str:
        """Return a digest: equal configs have equal ids."""
        text = json.dumps(self.model_dump(mode="json", exclude={"metrics_port"}), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


AnyConfig = EngineConfig | EndpointConfig


def parse_config(values: dict[str, Any]) -> AnyConfig:
    """Return the config of an engine, or of an endpoint if the key ``endpoint`` is there.

    Raise ``ValueError`` as ``EngineConfig.parse`` does.
    """
    return EndpointConfig.parse(values) if "endpoint" in values else EngineConfig.parse(values)


def is_public(host: str) -> bool:
    """Tell whether a host is an address that is neither of this machine nor private; False for names."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return not (address.is_loopback or address.is_private)
