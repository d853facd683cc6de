"""Simulate stock vLLM under other limits over the lengths seen so far, by fitted step times.

A prediction is work per second as the race measures it, so the two can be compared. The simulation has several times
the rows that run at once, for those that begin together also end together, and it goes on a part at a time.
"""

from dataclasses import replace

import numpy as np

from pipemax.domain.step_records import StepLimits
from pipemax.sim.measured_engine import MeasuredEngine, MeasuredTimes
from pipemax.sim.stage_times import StepWork
from pipemax.sim.systems.continuous import ContinuousBatching, stock_vllm
from pipemax.sim.systems.scenario import measured_scenario
from pipemax.sim.workloads import Workload, grain_of
from pipemax.tuning.step_fit import StepFit, WorkCosts
from pipemax.tuning.table import Envelope, Lengths

_ENOUGH_OUTPUTS = 800
"""Outputs of a row in grains, on average. With fewer, rows are preempted less often than they are."""
_ROWS_TO_FILL = 2.0
"""Rows that end before the engine counts as steady, as a multiple of those that run at once."""
_ROWS_TO_MEASURE = 5.0
_FEWEST_ROWS = 300
_MAX_ROWS = 20_000


class _CountedTimes(MeasuredTimes):
    """Step times that also add up the work and the seconds of a steady engine's steps."""

    def __init__(self, engine: MeasuredEngine, costs: WorkCosts) -> None:
        super().__init__(engine)
        self._costs = costs
        self.num_steps = 0
        self.is_steady = False
        self.seconds = 0.0
        self.work_s = 0.0

    def stage_s(self, work: StepWork) -> list[float]:
        """Return the seconds of the step, and count it."""
        seconds = super().stage_s(work)
        self.num_steps += 1
        if self.is_steady:
            self.seconds += seconds[0]
            self.work_s += (
                self._costs.prompt_token_s * work.prefill_tokens
                + self._costs.decode_s * work.decode_requests
                + self._costs.kv_token_s * work.decode_context_tokens
            )
        return seconds


class Prediction:
    """The simulation of one engine under fixed limits. Equal arguments give equal rates."""

    def __init__(self, fit: StepFit, envelope: Envelope, lengths: Lengths, limits: StepLimits) -> None:
        running = min(envelope.rows_that_fit(lengths), limits.running_rows)
        num_rows = round((_ROWS_TO_FILL + _ROWS_TO_MEASURE + 1) * running)
        num_rows = min(_MAX_ROWS, max(_FEWEST_ROWS, num_rows))
        self.limits = limits
        self._first = min(round(_ROWS_TO_FILL * running), num_rows // 3)
        self._last = num_rows - min(round(running), num_rows // 3)
        workload = _resampled(lengths, num_rows)
        grain = grain_of(workload, envelope.capacity.block_tokens, enough_outputs=_ENOUGH_OUTPUTS)
        scenario = measured_scenario(_engine(fit, envelope, limits, workload), workload, grain=grain)
        assert scenario.measured is not None
        self._costs = replace(fit.costs, kv_token_s=fit.costs.kv_token_s * grain)
        self._times = _CountedTimes(scenario.measured, self._costs)
        self._recomputed = [0, 0]  # tokens, when the steady part began and now
        self._is_over = False
        self._stops_at = 0
        self._system = ContinuousBatching(
            replace(scenario, on_progress=self._watch),
            stock_vllm(limits.step_tokens, max_num_seqs=limits.running_rows),
        )
        self._system.machine.times = self._times
        self._system.start()

    def advance(self, max_steps: int) -> float | None:
        """Simulate so many steps; return the work per second once the steady part is over, else ``None``."""
        self._stops_at = self._times.num_steps + max_steps
        self._system.machine.queue.run()
        if not self._is_over:
            return None
        again_s = (self._recomputed[1] - self._recomputed[0]) * self._costs.prompt_token_s
        return (self._times.work_s - again_s) / self._times.seconds

    def _watch(self, num_ended: int) -> None:
        """Note after each step whether it was of the steady part."""
        self._times.is_steady = self._first <= num_ended < self._last
        self._recomputed[num_ended >= self._first] = self._system.recomputed_tokens
        self._is_over = num_ended >= self._last and self._times.seconds > 0
        if self._is_over or self._times.num_steps >= self._stops_at:
            self._system.machine.queue.stop()


def _resampled(lengths: Lengths, num_rows: int) -> Workload:
    chosen = np.random.default_rng(0).choice(len(lengths), num_rows, replace=num_rows > len(lengths))
    shared = int(lengths.mean_found)
    return Workload(
        name="rows that ended",
        prompt_tokens=np.maximum(lengths.prompt_tokens[chosen], shared + 1),
        output_tokens=np.maximum(lengths.output_tokens[chosen], 1),
        shared_prefix_tokens=shared,
    )


def _engine(fit: StepFit, envelope: Envelope, limits: StepLimits, workload: Workload) -> MeasuredEngine:
    longest = int((workload.prompt_tokens + workload.output_tokens).max())
    return MeasuredEngine(
        stages=(fit.stage,),
        round_trip_s=0.0,
        capacity=envelope.capacity,
        num_batches=1,
        max_num_seqs=limits.running_rows,
        max_batched_tokens=limits.step_tokens,
        max_model_len=longest,
    )
