"""Define requests and completions: plain values, which ``pipemax.api`` offers to users.

``Sampling`` and ``Completion`` are the one table of fields (``pipemax.fields``).
"""

import hashlib
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import pyarrow as pa

from pipemax.fields import Carried, Setting, carried, setting, table_rows

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

    max_tokens: int = setting(
        256,
        "Maximum output tokens per row.",
        row_type=pa.int32(),
        openai_names=("max_tokens", "max_completion_tokens"),
    )
    temperature: float = setting(
        0.0, "Sampling temperature; 0 is greedy.", row_type=pa.float64(), openai_names=("temperature",)
    )
    top_p: float = setting(
        1.0,
        "Sample only from the likeliest tokens, up to this total probability.",
        row_type=pa.float64(),
        openai_names=("top_p",),
    )
    top_k: int = setting(
        0,
        "Sample only from this many likeliest tokens; 0 means all.",
        row_type=pa.int32(),
        openai_names=("top_k",),
    )
    seed: int | None = setting(
        None, "Seed that makes sampling repeatable.", row_type=pa.int64(), openai_names=("seed",)
    )
    # The output ends before the first of these texts.
    stop: tuple[str, ...] = setting(
        (), "Stop string. May be repeated.", row_type=pa.list_(pa.string()), openai_names=("stop",)
    )
    # The engine gets a JSON schema, as text.
    response_format: str | None = setting(
        None,
        "Format that every output must follow: a JSON schema, a schema in ai_query's envelope, or a Spark type such "
        "as STRUCT<label: STRING>; given as text or as a file.",
        openai_names=("response_format",),
    )
    choice: tuple[str, ...] = setting(
        (),
        "A text that the answer may be; repeat it for each choice. Labels that differ in their first token cost one.",
        openai_names=("choice",),
    )
    regex: str | None = setting(
        None, "Regular expression that every answer must match as a whole.", openai_names=("regex",)
    )
    grammar: str | None = setting(
        None,
        "Grammar that every answer must follow, in EBNF (root ::= …) or Lark; given as text or as a file.",
        openai_names=("grammar",),
    )
    logprobs: bool = setting(
        False,
        "Add the log-probability of each answer, or with --choice the probability of each choice.",
        openai_names=("logprobs",),
    )
    n: int = setting(
        1,
        "Samples per row, with --temperature above 0: the answer is the most frequent one, with all samples and their "
        "agreement.",
        openai_names=("n",),
    )
    attempts: int = setting(
        1,
        "Maximum attempts per row: an answer that is invalid or was cut is tried again with another seed.",
    )
    attempts_show_error: bool = setting(
        False, "Show the model its invalid answer, and what is wrong with it, when a row is tried again."
    )
    chat_template_kwargs: str | None = setting(
        None,
        'JSON object of variables for the model\'s chat template, such as {"enable_thinking": false}.',
        openai_names=("chat_template_kwargs",),
    )
    reasoning_effort: str | None = setting(
        None,
        "How much the model thinks (low, medium, high, …), if its chat template takes that.",
        openai_names=("reasoning_effort",),
    )
    # None where the engine splits no thinking off.
    include_reasoning: bool | None = setting(
        None, "Whether to keep the thinking that the engine's reasoning_parser splits off; default: keep it."
    )
    lora: str | None = setting(
        None, "Adapter for all rows, by its name under lora: in the engine config.", row_type=pa.string()
    )
    task: str = setting(GENERATE, "generate, or with a pooling model embed, classify or score.")
    dimensions: int | None = setting(
        None, "With --task embed: length of the embeddings, of a model whose embeddings may be cut."
    )
    normalize: bool | None = setting(
        None, "With --task embed: whether embeddings have length 1; default: as the model says, mostly yes."
    )
    truncate: bool = setting(False, "With a pooling task: cut prompts that are too long for the model.")

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
            for column in fields(Sampling):
                name = column.name
                if name not in _OF_POOLING and getattr(self, name) != column.default:
                    raise ValueError(
                        f"task {self.task} generates no text, so {name} has no meaning; leave {name} out"
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
        names = [name for name in _CONSTRAINTS if getattr(self, name) not in (None, ())]
        if len(names) > 1:
            raise ValueError(f"{' and '.join(names)} are given; an answer can follow only one of them")
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


def _generates(settings: Sampling) -> bool:
    return not settings.is_pooling


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
        None, pa.string(), "`stop`, or `length` when cut at `--max-tokens`", is_asked=_generates
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
    probabilities: tuple[tuple[str, float], ...] | None = carried(
        None,
        pa.map_(pa.string(), pa.float64()),
        "with `--logprobs` and `--choice`: each choice with its probability among all choices; with `--task classify`: "
        "each of the model's labels with its probability",
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


SETTINGS = table_rows(Sampling, Setting)
"""What can be set for generating rows, by name."""
CARRIED = table_rows(Completion, Carried)
"""What a completion carries to the annotation, by name."""
_ANSWERS = {
    GENERATE: ("text",),
    "embed": ("embedding",),
    "classify": ("label", "probabilities"),
    "score": ("score",),
}
"""Task → the fields that hold its answer."""


def annotation_fields(settings: Sampling) -> list[str]:
    """Return the names of what an annotation with these settings carries, the answer first."""
    answer = _ANSWERS.get(settings.task, _ANSWERS[GENERATE])
    others = [name for name, row in CARRIED.items() if row.is_asked(settings) and name not in answer]
    return [*answer, *others]
