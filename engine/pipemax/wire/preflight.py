"""The question to an engine's environment before any engine starts, and its answer."""

from dataclasses import dataclass, field
from typing import Any

from pipemax.wire.generation_spec import GenerationSpec
from pipemax.wire.message import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightRequest(Message):
    """The request that ``python -m pipemax preflight`` reads from standard input before any engine starts."""

    engine: dict[str, Any]
    generation: GenerationSpec
    questions: tuple[GenerationSpec, ...] = ()
    """As in ``SessionHeader``; they are only checked."""
    question_names: tuple[str, ...] = ()
    """By which an error names a question."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    """Sampled rows as the engine would be sent them (rows of ``REQUEST_SCHEMA`` without their ids), which are only
    counted, never run. In place of an image each has a name."""
    rows: int | None = None
    """Number of rows in the sampled table that an engine server gets, if known."""
    has_images: bool = False
    """Whether rows have images, which the model must then take."""

    @property
    def num_requests(self) -> int | None:
        """The number of requests of all rows, if known: one for each question."""
        return None if self.rows is None else self.rows * max(1, len(self.questions))


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightReply(Message):
    """The reply that ``python -m pipemax preflight`` writes to standard output: one JSON line."""

    error: str = ""
    """One sentence that gives the value and the remedy; empty if engine and generation are fine."""
    model: str = ""
    model_fingerprint: str = ""
    """Changes when the model's files change, wherever they are: for a local directory a digest of names, sizes, whole
    small files and samples of large ones; for a hub name the resolved revision."""
    max_model_len: int = 0
    """Maximum tokens of prompt and output together; 0 if an endpoint does not say it."""
    prompt_tokens: list[int] = field(default_factory=list)
    """Tokens of each of the requests as the engine would see it, system message and chat template included; 0 for one
    that would end as an error."""
    token_note: str = ""
    """How these tokens are not exact, in words; empty if they are."""
    shared_prefix_tokens: int = 0
    """Tokens that all of these requests begin with, without those that would end as an error."""
    output_tokens: list[int] = field(default_factory=list)
    """Maximum tokens that each of the requests may generate, by its own settings, in all samples and attempts."""
    first_prompt: str = ""
    """The first sampled request as the model would see it."""
    engine: dict[str, Any] = field(default_factory=dict)
    """The engine config with every default filled in."""
    engine_settings: dict[str, Any] = field(default_factory=dict)
    """Settings that the job's engine must have, in place of those of its config."""
    row_lengths: dict[str, Any] | None = None
    """Lengths of the rows to come, from the sampled prompts, for the engine config under ``policy: auto``."""
    expected_rows: int | None = None
    """Approximate number of rows like the sampled ones that an engine's host pools will hold; None if unknown."""
    warnings: list[str] = field(default_factory=list)
    """What the user should know and need not act upon now, a sentence each."""
    versions: dict[str, str] = field(default_factory=dict)
    """Package → version in the engine's environment."""
