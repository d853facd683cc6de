"""Define requests and completions: plain values, which ``pipemax.api`` offers to users.

``Sampling`` (``pipemax.sampling``) and ``Completion`` are the one table of fields (``pipemax.fields``).
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa

from pipemax.fields import Carried, Setting, carried, table_rows
from pipemax.sampling import GENERATE as GENERATE
from pipemax.sampling import MOST_ATTEMPTS as MOST_ATTEMPTS
from pipemax.sampling import MOST_SAMPLES as MOST_SAMPLES
from pipemax.sampling import POOLING_TASKS as POOLING_TASKS
from pipemax.sampling import Sampling as Sampling

PAIR = ("query", "document")
"""The roles of the two messages of a row that is scored; vLLM uses these names too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image of a request. Exactly one of the fields is given."""

    # For pydantic, which writes requests as JSON between processes: bytes need not be UTF-8.
    __pydantic_config__: ClassVar[dict[str, str]] = {"ser_json_bytes": "base64", "val_json_bytes": "base64"}

    content: bytes | None = field(default=None, repr=False)
    """The image as a file has it: PNG, JPEG, WebP and so on."""
    source: str | None = None
    """A path that the engine can read, a ``file:`` or ``data:`` URL, or an http(s) URL of an allowed host."""

    def digest(self) -> str:
        """Return a digest of the bytes, or of where they are: equal on every machine."""
        content = (
            b"bytes" + self.content
            if self.content is not None
            else (self.source or "").encode(errors="surrogatepass")
        )
        return hashlib.blake2b(content, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation."""

    role: str
    """``system``, ``user`` or ``assistant``, as the model's chat template defines them."""
    content: str | tuple[str | Image, ...]
    """Text, or texts and images in their order."""
    fields: str | None = None
    """A JSON object, as text, of the turn's further fields for the chat template, such as ``tool_calls``."""

    @property
    def texts(self) -> tuple[str, ...]:
        """The content without images."""
        if isinstance(self.content, str):
            return (self.content,)
        return tuple(part for part in self.content if isinstance(part, str))

    @property
    def images(self) -> tuple[Image, ...]:
        if isinstance(self.content, str):
            return ()
        return tuple(part for part in self.content if isinstance(part, Image))

    def identity(self) -> list[Any]:
        """Return plain values that are equal for equal messages, with each image as its digest."""
        fields = [] if self.fields is None else [self.fields]
        if isinstance(self.content, str):
            return [self.role, self.content, *fields]
        parts = [part if isinstance(part, str) else {"image": part.digest()} for part in self.content]
        return [self.role, parts, *fields]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One row to generate. Unless exactly one of ``prompt`` and ``messages`` is given, it becomes an error."""

    request_id: str
    """Unique among the requests in flight."""
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    system: str | None = None
    """System message to put before the prompt or messages."""
    sampling: Sampling = field(default_factory=Sampling)

    @property
    def images(self) -> tuple[Image, ...]:
        """The images of all messages, in their order."""
        return tuple(image for message in self.messages or () for image in message.images)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestError:
    """The reason why a request has no output."""

    code: str
    """A ``pipemax.wire.ErrorCode``."""
    message: str
    """One sentence that gives the value and the remedy."""


def _generates(settings: Sampling) -> bool:
    return not settings.is_pooling


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What rows cost at an endpoint."""

    requests: int = 0
    """Requests sent, retries included."""
    retries: int = 0
    prompt_tokens: int = 0
    """Tokens that the endpoint reports as used, over all samples and attempts."""
    output_tokens: int = 0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(
            requests=self.requests + other.requests,
            retries=self.retries + other.retries,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
        )

    def __sub__(self, other: "Spent") -> "Spent":
        return Spent(
            requests=self.requests - other.requests,
            retries=self.retries - other.retries,
            prompt_tokens=self.prompt_tokens - other.prompt_tokens,
            output_tokens=self.output_tokens - other.output_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The outcome of one request, good or bad."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"ser_json_bytes": "base64", "val_json_bytes": "base64"}
    """How it crosses to and from a replica as JSON, which has no bytes."""
    request_id: str
    text: str | None = carried(
        None,
        pa.string(),
        "the model's answer; null for error rows, but kept for `response_format` errors",
    )
    finish_reason: str | None = carried(
        None,
        pa.string(),
        "`stop`, `length` when cut at `--max-tokens`, or [`repetition`](limits.md#repetition)",
        is_asked=_generates,
    )  # or ``abort``
    prompt_tokens: int = carried(0, pa.int32(), "by the model's tokenizer", is_asked=lambda _: True)
    completion_tokens: int = carried(0, pa.int32(), "by the model's tokenizer", is_asked=_generates)
    token_ids: tuple[int, ...] = ()
    error: RequestError | None = None
    """If the answer is only invalid, or was cut while the model thought, ``text`` and ``reasoning`` are kept too."""
    reasoning: str | None = carried(
        None,
        pa.string(),
        "if the engine config names a `reasoning_parser`: the model's [thinking](answers.md#thinking)",
        is_asked=lambda settings: bool(settings.include_reasoning),
    )
    reasoning_tokens: int | None = carried(
        None,
        pa.int32(),
        "tokens of `completion_tokens` that the thinking took",
        is_asked=lambda settings: settings.include_reasoning is not None,
    )
    logprob_sum: float | None = carried(
        None,
        pa.float64(),
        "with `--logprobs`: how [sure](answers.md#confidence) the model was, as the natural logarithm of the answer's "
        "probability",
        is_asked=lambda settings: settings.logprobs and not settings.choice,
    )
    logprob_mean: float | None = carried(
        None,
        pa.float64(),
        "`logprob_sum` divided by the answer's tokens",
        is_asked=lambda settings: settings.logprobs and not settings.choice,
    )
    field_probabilities: tuple[tuple[str, float], ...] | None = carried(
        None,
        pa.map_(pa.string(), pa.float64()),
        "with `--logprobs` and `--response-format`: each of the answer's fields with its probability",
        is_asked=lambda settings: settings.logprobs and settings.response_format is not None,
    )
    probabilities: tuple[tuple[str, float], ...] | None = carried(
        None,
        pa.map_(pa.string(), pa.float64()),
        "with `--logprobs` and `--choice`: each choice with its probability among all choices; with `--task classify`: "
        "each of the model's labels with its probability",
        is_asked=lambda settings: settings.logprobs and bool(settings.choice),
    )
    probability: float | None = carried(
        None,
        pa.float64(),
        "of `probabilities`: that of the answer",
        is_asked=lambda settings: settings.logprobs and bool(settings.choice),
    )
    samples: tuple[str | None, ...] | None = carried(
        None,
        pa.list_(pa.string()),
        "with `--n`: the answer of each [sample](answers.md#several-samples), null where it is invalid",
        is_asked=lambda settings: settings.n > 1,
    )
    agreement: float | None = carried(
        None,
        pa.float64(),
        "with `--n`: the share of samples whose answer is the most frequent one",
        is_asked=lambda settings: settings.n > 1,
    )
    attempts: int = carried(
        1,
        pa.int32(),
        "with `--attempts`: which [attempt](answers.md#invalid-answers-tried-again) gave the answer, from 1",
        is_asked=lambda settings: settings.attempts > 1,
    )
    # float32 values in the machine's byte order. Plain bytes, because a row may have thousands of values: Arrow takes
    # them as they are.
    embedding: bytes | None = carried(
        None, pa.list_(pa.float32()), "with `--task embed`: the [embedding](embed.md)"
    )
    label: str | None = carried(
        None, pa.string(), "with `--task classify`: the most probable [label](embed.md#classes)"
    )
    score: float | None = carried(
        None,
        pa.float64(),
        "with `--task score`: how well the document answers the [query](embed.md#scores)",
    )
    is_reused: bool = False
    """Whether the outcome is that of an equal request, and the engine has done nothing for this one."""
    spent: Spent | None = None
    """What an endpoint was asked for this row; None for other engines."""


SETTINGS = table_rows(Sampling, Setting)
"""What can be set for generating rows, by name."""
CARRIED = table_rows(Completion, Carried)
"""What a completion carries to the annotation, by name."""
_ANSWERS = {
    GENERATE: ("text",),
    "embed": ("embedding",),
    "classify": ("label", "probabilities", "probability"),
    "score": ("score",),
}
"""Task → the fields that hold its answer."""


def annotation_fields(settings: Sampling) -> list[str]:
    """Return the names of what an annotation with these settings carries, the answer first."""
    answer = _ANSWERS.get(settings.task, _ANSWERS[GENERATE])
    others = [name for name, row in CARRIED.items() if row.is_asked(settings) and name not in answer]
    return [*answer, *others]
