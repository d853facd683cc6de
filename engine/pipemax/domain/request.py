"""What the decision core knows of a request: lengths and shared prefixes, never tokens or text."""

from dataclasses import dataclass
from typing import NewType

from pipemax.domain.units import RequestId

PrefixId = NewType("PrefixId", str)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefix:
    """The leading tokens that a request has in common with every other request naming the same id.

    Templated prompts have one. Only the prefix's whole blocks are shared; their KV is counted once per pool, however
    many requests hold it.
    """

    prefix_id: PrefixId
    num_tokens: int

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"a shared prefix has at least one token, not {self.num_tokens}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """One request as it is admitted."""

    request_id: RequestId
    prompt_tokens: int
    max_tokens: int
    """Maximum output tokens; prompt and output together fit into ``max_model_len``, which the caller checks."""
    expected_output_tokens: int | None = None
    """The caller's forecast of its output, if any; None takes the running mean of finished requests."""
    prefix: SharedPrefix | None = None

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.max_tokens < 1:
            raise ValueError(
                f"request {self.request_id}: prompt_tokens and max_tokens are at least 1, "
                f"not {self.prompt_tokens} and {self.max_tokens}"
            )
        if self.expected_output_tokens is not None and self.expected_output_tokens < 1:
            raise ValueError(f"request {self.request_id}: expected_output_tokens is at least 1")
        if self.prefix is not None and self.prefix.num_tokens > self.prompt_tokens:
            raise ValueError(
                f"request {self.request_id}: its prefix of {self.prefix.num_tokens} tokens is longer than its "
                f"prompt of {self.prompt_tokens}"
            )

    @property
    def max_kv_tokens(self) -> int:
        """The maximum tokens whose KV it may ever hold: the last output token is sampled, but never attended to."""
        return self.prompt_tokens + self.max_tokens - 1
