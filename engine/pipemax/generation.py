"""Define requests, completions, and the interface of an engine that turns requests into completions.

These are plain values: ``pipemax.api`` offers them to users, ``pipemax.vllm_ext`` implements ``Engine``.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Protocol

GENERATE = "generate"
POOLING_TASKS = ("embed", "classify", "score")
"""The tasks that read a prompt and generate nothing: the model's pooled output is the answer."""
PAIR = ("query", "document")
"""The roles of the two messages of a row that is scored; vLLM uses these names too."""
MOST_SAMPLES = 128
MOST_ATTEMPTS = 20
_OF_POOLING = ("task", "dimensions", "normalize", "truncate", "lora")
"""Settings that a pooling task may have."""
_CONSTRAINTS = ("response_format", "choice", "regex", "grammar")


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
class Sampling:
    """The settings by which one request's tokens are chosen."""

    max_tokens: int = 256
    """Maximum output tokens."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """Number of likeliest tokens to sample from; 0 keeps all."""
    stop: tuple[str, ...] = ()
    """The output ends before the first of these strings."""
    seed: int | None = None
    response_format: str | None = None
    """A JSON schema, as text, that the output must conform to."""
    choice: tuple[str, ...] = ()
    """The answer is one of these."""
    regex: str | None = None
    """A regular expression that the whole answer must match."""
    grammar: str | None = None
    """A grammar, in EBNF or Lark, that the answer must follow."""
    logprobs: bool = False
    """Return how probable the answer was, and with ``choice`` how probable each choice was."""
    n: int = 1
    """Samples for each request; the answer is the most frequent one."""
    attempts: int = 1
    """Maximum tries for each sample: an answer that is invalid or cut is tried again with another seed."""
    attempts_show_error: bool = False
    """Show the model its invalid answer and what is wrong with it, when it tries again."""
    chat_template_kwargs: str | None = None
    """A JSON object, as text, of further variables for the chat template, such as ``{"enable_thinking": false}``."""
    reasoning_effort: str | None = None
    """Value of the chat template's variable of the same name."""
    include_reasoning: bool | None = None
    """Whether to return the thinking; None where the engine splits none off."""
    lora: str | None = None
    """The adapter to use, by its name in the engine config; ``None`` uses the model as it is."""
    task: str = GENERATE
    """``generate``, or a task of a pooling model: ``embed``, ``classify`` or ``score`` (a query and a document)."""
    dimensions: int | None = None
    """With ``embed``: length of the embedding, of a model that was trained to be cut (Matryoshka)."""
    normalize: bool | None = None
    """With ``embed``: whether the embedding has length 1; None for the model's own default, mostly yes."""
    truncate: bool = False
    """With a pooling task: cut a prompt that is longer than the model takes, instead of failing its row."""

    @property
    def is_pooling(self) -> bool:
        """Whether the task generates nothing."""
        return self.task in POOLING_TASKS

    @property
    def is_constrained(self) -> bool:
        """Whether the answer must follow a schema, a choice, a regular expression or a grammar."""
        return bool(self.response_format or self.choice or self.regex or self.grammar)

    def __post_init__(self) -> None:
        self._check_task()
        # The conditions are written so that NaN fails too: every comparison with NaN is false.
        if not self.max_tokens >= 1:
            raise ValueError(f"max_tokens is {self.max_tokens}, must be at least 1")
        if not 0.0 <= self.temperature <= 2.0:
            raise ValueError(f"temperature is {self.temperature}, must be between 0 (greedy) and 2")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}, must be above 0 and at most 1")
        if not self.top_k >= 0:
            raise ValueError(f"top_k is {self.top_k}, must be 0 (all tokens) or more")
        if "" in self.stop:  # every output would end before its first token
            raise ValueError("stop has an empty text; leave it out")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}, must be at least 0 and below 2**63")
        self._check_constraint()
        self._check_repetition()

    def _check_task(self) -> None:
        if self.task not in (GENERATE, *POOLING_TASKS):
            raise ValueError(f"task is {self.task!r}, must be {', '.join((GENERATE, *POOLING_TASKS))}")
        if self.is_pooling:
            for each in fields(Sampling):
                if each.name not in _OF_POOLING and getattr(self, each.name) != each.default:
                    raise ValueError(
                        f"task {self.task} generates no text, so {each.name} has no meaning; leave {each.name} out"
                    )
        elif self.truncate:
            raise ValueError(f"truncate is for the tasks {', '.join(POOLING_TASKS)}; leave truncate out")
        for name in ("dimensions", "normalize"):
            if getattr(self, name) is not None and self.task != "embed":
                raise ValueError(
                    f"{name} is for the task embed, and the task is {self.task}; leave {name} out"
                )
        if self.dimensions is not None and not self.dimensions >= 1:
            raise ValueError(f"dimensions is {self.dimensions}, must be at least 1")

    def _check_constraint(self) -> None:
        given = [name for name in _CONSTRAINTS if getattr(self, name) not in (None, ())]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given; an answer can follow only one of them")
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None and not getattr(self, name).strip():
                raise ValueError(f"{name} is empty; leave it out")
        if not self.choice:
            return
        if len(self.choice) == 1:
            raise ValueError(f"choice has only {self.choice[0]!r}; give at least two choices")
        if blank := [choice for choice in self.choice if not choice.strip()]:
            raise ValueError(f"choice has {blank[0]!r}, which is empty or blank; leave it out")
        if len(set(self.choice)) < len(self.choice):
            doubled = next(choice for choice in self.choice if self.choice.count(choice) > 1)
            raise ValueError(f"choice has {doubled!r} twice; give it once")
        if self.stop:
            raise ValueError("stop and choice are given; a choice ends by itself, so leave stop out")

    def _check_repetition(self) -> None:
        if not 1 <= self.n <= MOST_SAMPLES:
            raise ValueError(f"n is {self.n}, must be between 1 and {MOST_SAMPLES}")
        if self.n > 1 and self.temperature == 0.0:
            raise ValueError(
                f"n is {self.n} with temperature 0, so all samples would be equal; set a temperature above 0"
            )
        if not 1 <= self.attempts <= MOST_ATTEMPTS:
            raise ValueError(f"attempts is {self.attempts}, must be between 1 and {MOST_ATTEMPTS}")
        if self.attempts_show_error and self.attempts == 1:
            raise ValueError("attempts_show_error needs attempts above 1")
        if self.attempts > 1 and self.temperature == 0.0 and not self.attempts_show_error:
            raise ValueError(
                f"attempts is {self.attempts} with temperature 0, so a second attempt would give the same answer; set "
                "a temperature above 0, or attempts_show_error"
            )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The outcome of one request, good or bad."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"ser_json_bytes": "base64", "val_json_bytes": "base64"}
    """How it crosses to and from a replica as JSON, which has no bytes."""
    request_id: str
    text: str | None = None
    finish_reason: str | None = None
    """``stop``, ``length`` or ``abort``."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    error: RequestError | None = None
    """If the answer is only invalid, or was cut while the model thought, ``text`` and ``reasoning`` are kept too."""
    reasoning: str | None = None
    """The model's thinking, if the engine splits it off."""
    reasoning_tokens: int | None = None
    """Tokens of ``completion_tokens`` that the thinking took; None if the engine splits none off."""
    logprob_sum: float | None = None
    """Natural logarithm of the answer's probability; with ``logprobs``, except for a choice."""
    logprob_mean: float | None = None
    """``logprob_sum`` divided by the answer's tokens."""
    probabilities: tuple[tuple[str, float], ...] | None = None
    """Each choice with its probability among all choices; with ``logprobs`` and ``choice``. With the task ``classify``:
    each of the model's labels with its probability."""
    samples: tuple[str | None, ...] | None = None
    """With ``n`` above 1: the answer of each sample, null where it is invalid."""
    agreement: float | None = None
    """With ``n`` above 1: the share of samples whose answer is the most frequent one."""
    attempts: int = 1
    """The number of the attempt that gave the answer, from 1."""
    embedding: bytes | None = None
    """With the task ``embed``: float32 values, in the machine's byte order. Plain bytes, because a row may have
    thousands of values: Arrow takes them as they are."""
    label: str | None = None
    """With the task ``classify``: the most probable label."""
    score: float | None = None
    """With the task ``score``: how well the document answers the query."""
    is_reused: bool = False
    """Whether the outcome is that of an equal request, and the engine has done nothing for this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine at one instant."""

    phase: str = "idle"
    """``idle`` | ``prefill`` | ``decode`` | ``mixed``."""
    running_requests: int = 0
    waiting_requests: int = 0
    kv_usage: float = 0.0
    """Share of the GPU's KV blocks in use, 0 to 1."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Further figures by name."""
    policy: dict[str, Any] = field(default_factory=dict)
    """The ``PolicyChoice`` under which the engine runs, as plain values."""
    replicas: tuple[dict[str, Any], ...] = ()
    """The figures of each replica by name, if there are several: those above are then of all together."""


class Engine(Protocol):
    """The engine that the server drives. Thread-safe, except that ``poll`` has one caller."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests. A bad request raises nothing: ``poll`` returns it with an error."""

    def poll(self, timeout_s: float) -> list[Completion]:
        """Return the requests that have ended since the last call; wait up to ``timeout_s`` for the first.

        Raise ``EngineDiedError`` once the engine is gone; every request in flight is then lost.
        """

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests. ``poll`` does not return them unless they had ended already. Unknown ids are ignored."""

    def set_input_open(self, is_open: bool) -> None:
        """Say whether more requests may come soon; at first none are expected.

        While more are expected, a prefill phase that has room left waits a moment for them.
        """

    def admission_credit_tokens(self) -> int:
        """Return how many more tokens (prompt and expected output) the engine can take.

        The count is the room beyond its present requests by the end of its next prefill phase; it is negative if more
        tokens wait than will fit.
        """

    def stats(self) -> EngineStats: ...

    def close(self) -> None:
        """Stop the engine and wait for its processes to end. Safe to call twice."""
