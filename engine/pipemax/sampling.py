"""Define the settings by which one request's tokens are chosen.

``Sampling`` is a part of the one table of fields (``pipemax.fields``).
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

import pyarrow as pa

from pipemax.fields import setting

GENERATE = "generate"
POOLING_TASKS = ("embed", "classify", "score")
"""The tasks that read a prompt and generate nothing: the model's pooled output is the answer."""
MOST_SAMPLES = 128
MOST_ATTEMPTS = 20
MOST_REPEATED_TOKENS = 64
"""Length of the longest pattern that ``stop_repetition`` finds."""
_OF_POOLING = ("task", "dimensions", "normalize", "truncate", "lora")
"""Settings that a pooling task may have."""
_CONSTRAINTS = ("response_format", "choice", "regex", "grammar")
_NEEDS_FREE_TEXT = ("min_tokens", "ignore_eos", "bad_words")
"""Settings that could leave a constrained answer without any token to go on with."""
_NEEDS_TEXT = ("stop", "stop_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty")
"""Settings that make no sense where the model only chooses among texts."""
_BY_TOKENS_BEFORE = (
    *("min_tokens", "bad_words", "thinking_tokens", "stop_repetition"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Settings by which a token depends on those that the output has already."""


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
    min_p: float = setting(
        0.0,
        "Sample only from tokens at least this many times as likely as the likeliest.",
        row_type=pa.float64(),
        openai_names=("min_p",),
    )
    seed: int | None = setting(
        None, "Seed that makes sampling repeatable.", row_type=pa.int64(), openai_names=("seed",)
    )
    # The output ends before the first of these texts.
    stop: tuple[str, ...] = setting(
        (), "Stop string. May be repeated.", row_type=pa.list_(pa.string()), openai_names=("stop",)
    )
    stop_token_ids: tuple[int, ...] = setting(
        (),
        "Token id that ends the output. May be repeated.",
        row_type=pa.list_(pa.int32()),
        openai_names=("stop_token_ids",),
    )
    stop_repetition: int = setting(
        0,
        "End an output that repeats the same 1 to 64 tokens this many times in a row; 0 lets it go on.",
        row_type=pa.int32(),
    )
    thinking_tokens: int | None = setting(
        None,
        "Maximum tokens of thinking; then the model must answer. Needs a reasoning_parser in the engine config.",
        row_type=pa.int32(),
        openai_names=("thinking_token_budget",),
    )
    min_tokens: int = setting(
        0, "Minimum output tokens per row.", row_type=pa.int32(), openai_names=("min_tokens",)
    )
    ignore_eos: bool = setting(
        False,
        "Go on to --max-tokens, past the model's own end.",
        row_type=pa.bool_(),
        openai_names=("ignore_eos",),
    )
    bad_words: tuple[str, ...] = setting(
        (),
        "Word that no output may have. May be repeated.",
        row_type=pa.list_(pa.string()),
        openai_names=("bad_words",),
    )
    presence_penalty: float = setting(
        0.0,
        "Make tokens that the output has less likely, from -2 to 2.",
        row_type=pa.float64(),
        openai_names=("presence_penalty",),
    )
    frequency_penalty: float = setting(
        0.0,
        "Make tokens less likely each time that the output has them, from -2 to 2.",
        row_type=pa.float64(),
        openai_names=("frequency_penalty",),
    )
    repetition_penalty: float = setting(
        1.0,
        "Make tokens that the prompt or the output has less likely, above 1.",
        row_type=pa.float64(),
        openai_names=("repetition_penalty",),
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

    @property
    def can_speculate(self) -> bool:
        """Whether vLLM's n-gram speculation leaves the answer as it is.

        A sampled row has other random numbers with it. With choices there is one token to gain at most, and vLLM
        drops the scores of choices from steps in which another row has drafts (``rejection_sampler.py``). What depends
        on the tokens before has not been tried with drafts.
        """
        is_plain = self.temperature == 0.0 and not self.choice and not self.is_pooling
        return is_plain and self._first_set(_BY_TOKENS_BEFORE) is None

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
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p is {self.min_p}, must be between 0 (all tokens) and 1")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}, must be at least 0 and below 2**63")
        self._check_ends()
        self._check_penalties()
        self._check_constraint()
        self._check_samples()

    def _check_task(self) -> None:
        if self.task not in (GENERATE, *POOLING_TASKS):
            raise ValueError(f"task is {self.task!r}, must be {', '.join((GENERATE, *POOLING_TASKS))}")
        if self.is_pooling:
            if name := self._first_set(name for name in _DEFAULTS if name not in _OF_POOLING):
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

    def _check_ends(self) -> None:
        if "" in self.stop:  # every output would end before its first token
            raise ValueError("stop has an empty text; leave it out")
        if any(token < 0 for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids has {min(self.stop_token_ids)}; a token id is at least 0")
        if self.stop_repetition != 0 and not self.stop_repetition >= 2:
            raise ValueError(f"stop_repetition is {self.stop_repetition}, must be 0 (off) or at least 2")
        if self.thinking_tokens is not None and not self.thinking_tokens >= 0:
            raise ValueError(f"thinking_tokens is {self.thinking_tokens}, must be at least 0")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, must be at least 0 and at most max_tokens, {self.max_tokens}"
            )
        if "" in self.bad_words or any(word.isspace() for word in self.bad_words):
            raise ValueError("bad_words has an empty or blank text; leave it out")

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be between -2 and 2")
        if not 0.0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}, must be above 0; 1 is none")

    def _check_constraint(self) -> None:
        names = [name for name in _CONSTRAINTS if getattr(self, name) not in (None, ())]
        if len(names) > 1:
            raise ValueError(f"{' and '.join(names)} are given; an answer can follow only one of them")
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None and not getattr(self, name).strip():
                raise ValueError(f"{name} is empty; leave it out")
        if self.is_constrained and (other := self._first_set(_NEEDS_FREE_TEXT)):
            raise ValueError(
                f"{other} and {names[0]} are given; {names[0]} says what an answer may be, so leave {other} out"
            )
        if not self.choice:
            return
        if len(self.choice) == 1:
            raise ValueError(f"choice has only {self.choice[0]!r}; give at least two choices")
        if blank := [choice for choice in self.choice if not choice.strip()]:
            raise ValueError(f"choice has {blank[0]!r}, which is empty or blank; leave it out")
        if len(set(self.choice)) < len(self.choice):
            doubled = next(choice for choice in self.choice if self.choice.count(choice) > 1)
            raise ValueError(f"choice has {doubled!r} twice; give it once")
        if other := self._first_set(_NEEDS_TEXT):
            raise ValueError(
                f"{other} and choice are given; the model only chooses among the texts, so leave {other} out"
            )

    def _first_set(self, names: Iterable[str]) -> str | None:
        """Return the first of these settings that is not at its default."""
        return next((name for name in names if getattr(self, name) != _DEFAULTS[name]), None)

    def _check_samples(self) -> None:
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


_DEFAULTS = {column.name: column.default for column in fields(Sampling)}
