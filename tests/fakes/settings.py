"""How the fake engine is told to behave, and what it answers."""

import dataclasses
from typing import Any, Literal

# In the words of torch 2.
GPU_FAULT = "the fake died: torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
KERNEL_ASSERTION = "the fake died: torch.AcceleratorError: CUDA error: device-side assert triggered"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FakeOptions:
    """``vllm: {fake: {...}}`` of an engine config."""

    load_s: float = 0.0
    """Time to start."""
    measures: bool = False
    """As a replica it says that its start measures what others need."""
    starts_together: tuple[str, int] | None = None
    """It has not started until so many engines have put a file into this directory; it fails after ``together_s``."""
    together_s: float = 60.0
    start_error: str | None = None
    """The engine does not start, for this reason."""
    latency_s: float = 0.0
    """Shortest time of a row; the longest is twice that, by its prompt."""
    tokens_per_s: float | None = None
    """Throughput of the whole engine, all rows together; none is as fast as can be."""
    held_by: str | None = None
    """A file: while it exists, rows end one by one, ``held_row_s`` after one another."""
    held_row_s: float = 0.05
    window_s: float = 0.01
    """Rows that end within one such window come in an order of their own."""
    admission_credit_tokens: int = 0
    child_process: bool = False
    """Start a process that watches the server and holds its GPUs as vLLM's do, and say its pid in the metrics."""
    child_ends_after_s: float = 0.0
    """How long that process outlives the server."""
    close_s: float = 0.0
    most_limits: tuple[int, int] | None = None
    """The tokens and the running rows of its steps, which may then change; fixed if there are none."""
    steps_s: float = 0.0
    """Its records are of steps of a synthetic engine, for as many seconds each time that they are taken."""
    tunings: str | None = None
    """The file of its remembered tunings; without one it is not tuned."""
    most_running: int | None = None
    """Rows beyond these count as waiting."""
    speculating: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options that take the place of these where the config has a ``speculative_config``."""
    prefix_memory: int = 0
    """Of so many last prompts the beginnings count as cached, word by word: for the hit rate in the metrics."""
    errs: float = 0.0
    """It answers this share of the prompts as if they had another word, and is unsure of them."""
    wavers: float = 0.0
    """It answers this share of the prompts as if they had another word each time that they come again."""
    dies: Literal["at once", "of any row", "of its GPU"] | None = None
    """At its first poll, by itself or by a fault of its GPU, or at the first poll after a row was submitted, whichever
    row it is."""


def fake_config(model: str = "fake", *, max_num_seqs: int | None = 16, **options: Any) -> dict[str, Any]:
    """An engine config for the fake, with ``FakeOptions`` by name."""
    return {"model": model, "max_num_seqs": max_num_seqs, "vllm": {"fake": options}}


def expected_text(prompt: str, max_tokens: int = 256) -> str:
    """The fake's answer to a plain prompt without marks and without a response format."""
    return " ".join(f"reply to {prompt}".split()[:max_tokens])
