"""A simulated stock vLLM whose limits change while it runs and whose step times scatter, as a tuner sees an engine.

It is ``pipemax.sim``'s continuous batching on one GPU, advanced a second at a time.
"""

from dataclasses import dataclass

import numpy as np

from pipemax.domain.step_records import StepLimits, StepRecords
from pipemax.sim.stage_times import StageTimes, StepWork
from pipemax.sim.systems.continuous import ContinuousBatching, stock_vllm
from pipemax.sim.systems.scenario import Scenario
from pipemax.tuning.table import Ints, Lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How an engine's speed scatters. The same seed gives the same speed at the same time, whatever the limits."""

    block_sd: float = 0.02
    """Of the speed over ``block_s``…"""
    block_s: float = 20.0
    drift: float = 0.05
    """From the slowest to the fastest, within half of ``drift_period_s``."""
    drift_period_s: float = 480.0
    step_sd: float = 0.03
    outlier_share: float = 0.002
    """Steps that take ``outlier_factor`` times as long."""
    outlier_factor: float = 5.0

    def scatter(self, seed: int) -> "Scatter":
        return Scatter(self, seed)


QUIET = Noise(block_sd=0.0, drift=0.0, step_sd=0.0, outlier_share=0.0)


class Scatter:
    """Factors of step times."""

    def __init__(self, noise: Noise, seed: int) -> None:
        self._noise = noise
        self._steps = np.random.default_rng([seed, 1])
        blocks = np.random.default_rng([seed, 2])
        self._blocks = np.exp(noise.block_sd * blocks.standard_normal(4096))
        self._phase = 2 * np.pi * blocks.random()

    def factor(self, now_s: float) -> float:
        noise = self._noise
        if noise == QUIET:
            return 1.0
        block = float(self._blocks[int(now_s / noise.block_s) % len(self._blocks)])
        drift = 1 + noise.drift / 2 * np.sin(2 * np.pi * now_s / noise.drift_period_s + self._phase)
        step = float(np.exp(noise.step_sd * self._steps.standard_normal()))
        outlier = noise.outlier_factor if self._steps.random() < noise.outlier_share else 1.0
        return float(block * drift * step * outlier)


class _System(ContinuousBatching):
    """Continuous batching that keeps which rows ended."""

    def __init__(self, scenario: Scenario, limits: StepLimits) -> None:
        self.ended: list[int] = []
        policy = stock_vllm(limits.step_tokens, max_num_seqs=limits.running_rows, keeps_preempted=True)
        super().__init__(scenario, policy)

    def _finish(self, request: int) -> None:
        super()._finish(request)
        self.ended.append(request)

    def outputs_left(self) -> Ints:
        """Return the rows that decode and their outputs still to come: shape (2, rows)."""
        members = [(row, left) for group in self._groups for row, _, left in group.running.members()]
        return np.array(members, dtype=np.int64).reshape(-1, 2).T


class _Times(StageTimes):
    """Step times that scatter, and a record of each step."""

    engine: "LiveEngine"

    def stage_s(self, work: StepWork) -> list[float]:
        engine = self.engine
        seconds = super().stage_s(work)[0] * engine.scatter.factor(engine.now_s)
        engine.note(work, seconds)
        return [seconds]


class LiveEngine:
    """One engine with all rows of a table waiting in it."""

    def __init__(self, scenario: Scenario, limits: StepLimits, scatter: Scatter) -> None:
        self.scatter = scatter
        self._steps: list[tuple[int, int, int, int, int, int, float]] = []
        self._lengths = np.stack([scenario.workload.prompt_tokens, scenario.workload.output_tokens])
        self._system = _System(scenario, limits)
        machine = self._system.machine
        times = _Times(scenario.node, scenario.model, machine.parallelism)
        times.engine = self
        machine.times = times
        self.capacity = machine.capacity
        self._num_preempted = 0
        self._system.start()

    @property
    def now_s(self) -> float:
        return self._system.machine.queue.now_s()

    @property
    def num_left(self) -> int:
        return self._system.num_waiting + self._system.num_running

    @property
    def recomputed_tokens(self) -> int:
        """Of preempted rows, less those found in the prefix cache."""
        return self._system.recomputed_tokens

    def note(self, work: StepWork, seconds: float) -> None:
        system = self._system
        preempted, self._num_preempted = system.num_preempted - self._num_preempted, system.num_preempted
        self._steps.append(
            (
                work.prefill_tokens,
                work.decode_requests,
                work.decode_context_tokens,
                system.num_running,
                system.num_waiting,
                preempted,
                seconds,
            )
        )

    def set_limits(self, limits: StepLimits) -> None:
        self._system.set_limits(step_tokens=limits.step_tokens, running_rows=limits.running_rows)

    def advance(self, seconds: float) -> tuple[StepRecords, Lengths]:
        """Run for some seconds; return the steps, the last of which may not have ended, and the rows that ended."""
        queue = self._system.machine.queue
        queue.run_until(self.now_s + seconds)
        arrays = np.array(self._steps, dtype=np.float64).reshape(-1, 7).T
        self._steps = []
        ended, self._system.ended = self._system.ended, []
        counts = arrays[:6].astype(np.int64)
        decoding, left = self._system.outputs_left()
        records = StepRecords(
            prompt_tokens=counts[0],
            decodes=counts[1],
            kv_tokens=counts[2],
            running=counts[3],
            waiting=counts[4],
            preempted=counts[5],
            seconds=arrays[6],
            outputs_so_far=self._lengths[1, decoding] - left,
        )
        return records, Lengths(prompt_tokens=self._lengths[0, ended], output_tokens=self._lengths[1, ended])
