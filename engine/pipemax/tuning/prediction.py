"""Simulate stock vLLM under other limits over the lengths seen so far, by fitted step times.

A prediction is work per second as the race measures it, so the two can be compared. The simulation has a few times the
rows that run at once, in grains of tokens where outputs are long, which costs a tenth of a second or so.
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

_ENOUGH_OUTPUTS = 48
"""Outputs of a row in grains, on average."""
_ROWS_TO_FILL = 1.5
"""Rows that end before the engine counts as steady, as a multiple of those that run at once."""
_ROWS_TO_MEASURE = 3.0
_FEWEST_ROWS = 300
_MAX_ROWS = 12_000


class _CountedTimes(MeasuredTimes):
    """Step times that also add up the work and the seconds of a steady engine's steps."""

    def __init__(self, engine: MeasuredEngine, costs: WorkCosts) -> None:
        super().__init__(engine)
        self._costs = costs
        self.is_steady = False
        self.seconds = 0.0
        self.work_s = 0.0

    def stage_s(self, work: StepWork) -> list[float]:
        """Return the seconds of the step, and count it."""
        seconds = super().stage_s(work)
        if self.is_steady:
            self.seconds += seconds[0]
            self.work_s += (
                self._costs.prompt_token_s * work.prefill_tokens
                + self._costs.decode_s * work.decode_requests
                + self._costs.kv_token_s * work.decode_context_tokens
            )
        return seconds


def predict_rate(fit: StepFit, envelope: Envelope, lengths: Lengths, limits: StepLimits) -> float:
    """Return work per second of a steady engine under these limits. Equal calls return equal rates."""
    fitting = min(envelope.rows_that_fit(lengths), limits.running_rows)
    fill = round(_ROWS_TO_FILL * fitting)
    num_rows = min(_MAX_ROWS, max(_FEWEST_ROWS, fill + round((1 + _ROWS_TO_MEASURE) * fitting)))
    first, last = min(fill, num_rows // 3), num_rows - min(round(fitting), num_rows // 3)
    workload = _resampled(lengths, num_rows)
    grain = grain_of(workload, envelope.capacity.block_tokens, enough_outputs=_ENOUGH_OUTPUTS)
    scenario = measured_scenario(_engine(fit, envelope, limits, workload), workload, grain=grain)
    assert scenario.measured is not None
    costs = replace(fit.costs, kv_token_s=fit.costs.kv_token_s * grain)
    times, recomputed = _CountedTimes(scenario.measured, costs), [0, 0]

    def watch(num_ended: int) -> None:
        times.is_steady = first <= num_ended < last
        recomputed[num_ended >= first] = system.recomputed_tokens
        if num_ended >= last:
            system.machine.queue.stop()

    system = ContinuousBatching(
        replace(scenario, on_progress=watch), stock_vllm(limits.step_tokens, max_num_seqs=limits.running_rows)
    )
    system.machine.times = times
    system.start()
    system.machine.queue.run()
    if times.seconds == 0:
        return 0.0
    return (times.work_s - (recomputed[1] - recomputed[0]) * costs.prompt_token_s) / times.seconds


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
