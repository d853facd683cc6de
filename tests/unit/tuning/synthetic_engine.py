"""An engine in a few lines: steady at once under any limits, with a step time of one's own and noise from a seed."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from pipemax.domain.specs import KvCapacity
from pipemax.domain.step_records import StepLimits, StepRecords
from pipemax.tuning.table import Envelope, Lengths
from pipemax.tuning.tuner import Stage, Tuner

DEFAULT = StepLimits(step_tokens=2048, running_rows=64)
CEILING = StepLimits(step_tokens=4096, running_rows=256)
PROMPT, OUTPUT = 320, 160

StepTime = Callable[[float, float, float], float]
"""Seconds of a step, of its decodes, prompt tokens and KV tokens."""


def memory_bound(decodes: float, prompts: float, kv_tokens: float) -> float:
    """Weights take most of a step, so that more rows are almost free."""
    return 0.02 + 4e-5 * (decodes + prompts) + 4e-9 * kv_tokens


def compute_bound(decodes: float, prompts: float, kv_tokens: float) -> float:
    return 4e-4 * (decodes + prompts) + 4e-9 * kv_tokens


def envelope(rows_that_fit: int = 225) -> Envelope:
    blocks = math.ceil(rows_that_fit * (PROMPT + OUTPUT / 2 + 8) / 16)
    return Envelope(
        default=DEFAULT,
        ceiling=CEILING,
        capacity=KvCapacity(block_tokens=16, gpu_blocks=blocks, host_blocks=0),
    )


@dataclass
class SyntheticEngine:
    step_s: StepTime
    rows_that_fit: int = 225
    speed: float = 1.0
    """Steps take so many times less."""
    noise: float = 0.02
    """Of the speed within 20 s."""
    seed: int = 0
    now_s: float = 0.0
    limits: StepLimits = DEFAULT
    seen: list[StepLimits] = field(default_factory=list)
    """Each limits that were set."""

    def mean_step(self, limits: StepLimits) -> tuple[float, float, float]:
        """Return decodes, prompt tokens and KV tokens of a step."""
        decodes = min(limits.running_rows, self.rows_that_fit, limits.step_tokens / (1 + PROMPT / OUTPUT))
        return decodes, decodes * PROMPT / OUTPUT, decodes * (PROMPT + OUTPUT / 2)

    def rate(self, limits: StepLimits) -> float:
        """Return the decodes per second without noise."""
        step = self.mean_step(limits)
        return step[0] / self.step_s(*step)

    def advance(self) -> tuple[StepRecords, Lengths]:
        """Run for about a second."""
        decodes, prompts, kv_tokens = self.mean_step(self.limits)
        mean_s = self.step_s(decodes, prompts, kv_tokens) / self.speed
        count = max(1, round(1.0 / mean_s))
        steps = np.random.default_rng([self.seed, int(self.now_s * 10)])
        block = np.random.default_rng([self.seed, int(self.now_s / 20)]).standard_normal()
        some = decodes * steps.uniform(0.85, 1.15, count)
        more = prompts * steps.uniform(0.5, 1.5, count)
        read = kv_tokens / decodes * some
        seconds = np.array([self.step_s(*step) for step in zip(some, more, read, strict=True)]) / self.speed
        seconds *= np.exp(self.noise * block) * steps.uniform(0.97, 1.03, count)
        self.now_s += float(seconds.sum())
        num_ended = round(count * decodes / OUTPUT)
        records = StepRecords(
            prompt_tokens=more.astype(np.int64),
            decodes=some.astype(np.int64),
            kv_tokens=read.astype(np.int64),
            running=some.astype(np.int64),
            waiting=np.full(count, 500),
            preempted=np.zeros(count, dtype=np.int64),
            seconds=seconds,
        )
        prompt_lengths = steps.integers(PROMPT // 2, PROMPT * 3 // 2, num_ended)
        output_lengths = steps.integers(OUTPUT // 2, OUTPUT * 3 // 2, num_ended)
        return records, Lengths(prompt_tokens=prompt_lengths, output_tokens=output_lengths)


Spoil = Callable[[StepRecords], StepRecords]


def drive(
    tuner: Tuner, engines: list[SyntheticEngine], table_s: float, spoil: Spoil = lambda records: records
) -> float:
    """Run until the tuner settles; return the seconds in which it did not wait. ``spoil`` may change records."""
    spent_s = 0.0
    for _ in range(3000):
        if tuner.tuned is not None:
            return spent_s
        before_s, is_waiting = max(engine.now_s for engine in engines), tuner.stage is Stage.MODEL
        parts = [engine.advance() for engine in engines]
        now_s = max(engine.now_s for engine in engines)
        spent_s += 0.0 if is_waiting else now_s - before_s
        ended = Lengths()
        for _, rows in parts:
            ended = ended.joined(rows, max_rows=10**6)
        limits = tuner.observe([spoil(steps) for steps, _ in parts], ended, expected_s=table_s - now_s)
        assert len(limits) == len(engines)
        for engine, one in zip(engines, limits, strict=True):
            engine.limits = one
            engine.seen.append(one)
    raise AssertionError("the tuner did not settle")


def starved(records: StepRecords) -> StepRecords:
    return replace(records, waiting=np.zeros_like(records.waiting))
