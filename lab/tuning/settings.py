"""The engines and tables on which the tuner is tried: six pairs of a model and a GPU, and four tables."""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from pipemax.domain.hardware import WeightDtype
from pipemax.domain.specs import KvCapacity, ModelSpec, NodeSpec, Parallelism, kv_capacity
from pipemax.domain.step_records import StepLimits
from pipemax.domain.workload import LengthStatistics, WorkloadSpec
from pipemax.presets import load_model, load_node, load_workload
from pipemax.sim.systems.scenario import Scenario
from pipemax.sim.workloads import Workload, draw_workload
from pipemax.tuning.table import Envelope, Lengths, steady_step_tokens

LLAMA_1B = ModelSpec(
    name="llama-3.2-1b",
    num_layers=16,
    hidden_size=2048,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    ffn_size=8192,
    num_experts=1,
    experts_per_token=1,
    vocab_size=128256,
    bytes_per_value=2,
    has_tied_embeddings=True,
)
"""Shapes as in the checkpoint's config.json."""
GPT_OSS_20B = replace(
    load_model("gpt-oss-120b"),
    name="gpt-oss-20b",
    num_layers=24,
    num_experts=32,
    full_layers=tuple(range(1, 24, 2)),
)
"""Shapes as in the checkpoint's config.json."""
QWEN3_32B_FP8 = load_model("qwen3-32b").with_weights(WeightDtype.FP8)

ENGINES = {
    "1b-l4": ("1xL4", LLAMA_1B),
    "1b-a100": ("1xA100-80GB", LLAMA_1B),
    "8b-a100": ("1xA100-80GB", load_model("qwen3-8b")),
    "8b-h100": ("1xH100", load_model("qwen3-8b")),
    "gpt-oss-20b-h100": ("1xH100", GPT_OSS_20B),
    "32b-fp8-h100": ("1xH100", QWEN3_32B_FP8),
}
_LARGE_GPU_BYTES = 70e9
"""From here on, but for A100s, vLLM's defaults for offline use are twice and four times as large."""

TABLES = {
    "classify": WorkloadSpec(
        name="classify",
        prompt=LengthStatistics(family="lognormal", mean=1500, median=1250, least=64, most=7000),
        output=LengthStatistics(family="lognormal", mean=8, median=7, least=2, most=32),
        context_tokens=7100,
        shared_prefix_tokens=0,
    ),
    "summarise": WorkloadSpec(
        name="summarise",
        prompt=LengthStatistics(family="lognormal", mean=1200, median=950, least=64, most=7000),
        output=LengthStatistics(family="lognormal", mean=150, median=135, least=16, most=600),
        context_tokens=7700,
        shared_prefix_tokens=0,
    ),
    "sharegpt": load_workload("sharegpt"),
    "reasoning": WorkloadSpec(
        name="reasoning",
        prompt=LengthStatistics(family="lognormal", mean=200, median=160, least=16, most=2000),
        output=LengthStatistics(family="lognormal", mean=3000, median=2400, least=128, most=12000),
        context_tokens=14100,
        shared_prefix_tokens=0,
    ),
}
"""Means are the issue's; medians and bounds are guesses, but for ShareGPT's."""
_DRAWN_ROWS = 5000
_GRID_ROWS = (0.3, 0.5, 0.7, 0.85, 1.0, 1.15)
_GRID_TOKENS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)


def _ceiling_of(default: StepLimits, capacity: KvCapacity, lengths: Lengths) -> StepLimits:
    """Return what an engine is started for; the product's formula leaves room for logits and activations as well."""
    room = Envelope(default=default, ceiling=default, capacity=capacity, least_step_tokens=1)
    fit = room.rows_that_fit(lengths)
    rows = max(256, default.running_rows, min(4096, -(-round(1.15 * fit) // 8) * 8))
    tokens = default.step_tokens * (2 if steady_step_tokens(fit, lengths) > 0.75 * default.step_tokens else 1)
    return StepLimits(step_tokens=max(tokens, rows), running_rows=rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """An engine and a table."""

    engine: str
    table: str

    @property
    def name(self) -> str:
        return f"{self.engine}/{self.table}"

    @property
    def node(self) -> NodeSpec:
        return load_node(ENGINES[self.engine][0])

    @property
    def model(self) -> ModelSpec:
        return ENGINES[self.engine][1]

    @property
    def default(self) -> StepLimits:
        gpu = self.node.gpu
        if gpu.memory_bytes >= _LARGE_GPU_BYTES and "A100" not in gpu.name:
            return StepLimits(step_tokens=16384, running_rows=1024)
        return StepLimits(step_tokens=8192, running_rows=256)

    def envelope(self) -> Envelope:
        capacity = kv_capacity(self.node, self.model, Parallelism(pipeline=1, tensor=1), frees_windows=True)
        lengths = self.sample()
        return Envelope(
            default=self.default, ceiling=_ceiling_of(self.default, capacity, lengths), capacity=capacity
        )

    def sample(self) -> Lengths:
        rows = _rows(self.table, _DRAWN_ROWS, 0)
        return Lengths(prompt_tokens=rows.prompt_tokens, output_tokens=rows.output_tokens)

    def scenario(self, num_rows: int, seed: int) -> Scenario:
        return Scenario(node=self.node, model=self.model, workload=_rows(self.table, num_rows, seed))

    def grid(self) -> list[StepLimits]:
        """Return the limits whose rates are the truth: the default, and 6 × 6 or fewer where some are the same."""
        envelope, lengths = self.envelope(), self.sample()
        fit = envelope.rows_that_fit(lengths)
        limits = [
            envelope.limits(envelope.ceiling.step_tokens * tokens, fit * rows)
            for tokens in _GRID_TOKENS
            for rows in _GRID_ROWS
        ]
        return [*dict.fromkeys([self.default, *limits])]

    def describe(self) -> str:
        envelope, lengths = self.envelope(), self.sample()
        fit = envelope.rows_that_fit(lengths)
        return (
            f"R_kv {fit:.0f}, M* {steady_step_tokens(min(fit, envelope.ceiling.running_rows), lengths):.0f}"
        )


@cache
def _drawn(table: str) -> Workload:
    return draw_workload(TABLES[table], _DRAWN_ROWS, np.random.default_rng(0))


def _rows(table: str, num_rows: int, seed: int) -> Workload:
    """Return rows of the table in an order of the seed; of more than were drawn, some several times."""
    drawn = _drawn(table)
    rng = np.random.default_rng([seed, 3])
    rounds = -(-num_rows // _DRAWN_ROWS)
    chosen = np.concatenate([rng.permutation(_DRAWN_ROWS) for _ in range(rounds)])[:num_rows]
    return replace(
        drawn, prompt_tokens=drawn.prompt_tokens[chosen], output_tokens=drawn.output_tokens[chosen]
    )


SETTINGS = [Setting(engine=engine, table=table) for engine in ENGINES for table in TABLES]
