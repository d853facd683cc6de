"""The estimators of all stages together: a step's predicted time, and how many blocks can be copied meanwhile.

Stages differ (uneven layers, the output head), so every quantity is taken per stage: a step is as long as its
slowest stage, and the prefetch budget (PipeMax, Equation 7) is the minimum over the stages.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from pipemax.control.controller_config import ControllerConfig, StageConfig
from pipemax.control.times.estimator import (
    BandwidthEstimator,
    FilledEstimator,
    MixedEstimator,
    MixedWork,
    OnlineEstimator,
    PhaseWork,
    PredictionError,
    Work,
)
from pipemax.control.times.profiling import Profile, TimedCopy, TimedStep
from pipemax.domain.events import StepTimed, TransferTimed
from pipemax.domain.plan import Phase, StepId


class StageEstimators:
    """Predicts step times and budgets, and learns from the times of the steps that ran."""

    MAX_UNTIMED = 256
    """Steps remembered until their times arrive."""
    MAX_TIMED = 4096
    """Timed steps and copies kept for a calibration."""

    def __init__(self, config: ControllerConfig) -> None:
        self._block_tokens = config.block_tokens
        self.timed_steps: deque[TimedStep] = deque(maxlen=self.MAX_TIMED)
        self.timed_copies: deque[TimedCopy] = deque(maxlen=self.MAX_TIMED)
        self.recalibrate(config.stages)
        self.is_calibrated = False
        """Whether the predictions begin with measured times, not with a first guess."""
        self.last_step_s = 0.0
        """Seconds of the step timed last, on its slowest stage; ``last_predicted_s`` is the prediction for it."""
        self.last_predicted_s = 0.0
        self._untimed: OrderedDict[StepId, Work] = OrderedDict()
        self._budgets: OrderedDict[StepId, int] = OrderedDict()

    def recalibrate(self, stages: Sequence[StageConfig]) -> None:
        """Start again from these coefficients, which were measured, one entry per stage."""
        self.is_calibrated = True
        self._stages = tuple(stages)
        timed = [(stage.decode_time, stage.prefill_time, stage.mixed_scales) for stage in stages]
        self._kinds = [timed.index(times) for times in timed]
        self.decode = tuple(OnlineEstimator(stage.decode_time) for stage in stages)
        self.prefill = tuple(OnlineEstimator(stage.prefill_time) for stage in stages)
        self._mixed = tuple(
            MixedEstimator(decode, prefill, stage.mixed_scales)
            for decode, prefill, stage in zip(self.decode, self.prefill, self._stages, strict=True)
        )
        self._batches: tuple[OnlineEstimator | FilledEstimator, ...] = self.decode
        self._fill_tokens = 0
        self._group_stages()
        self.h2d = tuple(BandwidthEstimator(stage.h2d_bytes_per_s) for stage in stages)

    def _group_stages(self) -> None:
        """Group the stages whose estimates are the same, so that each group is evaluated once.

        Simulated stages with equally many layers stay alike; those of a real engine differ once they were measured.
        """
        groups: dict[tuple[int, float, float, float, float], int] = {}
        self._group_of = [
            groups.setdefault(
                (kind, decode.batch_scale, decode.kv_scale, prefill.batch_scale, prefill.kv_scale),
                len(groups),
            )
            for kind, decode, prefill in zip(self._kinds, self.decode, self.prefill, strict=True)
        ]
        self._firsts = [self._group_of.index(group) for group in range(len(groups))]

    def _by_stage(self, seconds: Callable[[int], float]) -> tuple[float, ...]:
        """Return the seconds of each stage, of which those of one in each group are computed."""
        of_groups = [seconds(first) for first in self._firsts]
        return tuple([of_groups[group] for group in self._group_of])

    def _estimators(self, phase: Phase) -> tuple[OnlineEstimator, ...]:
        return self.decode if phase is Phase.DECODE else self.prefill

    def predict(self, work: Work) -> tuple[float, ...]:
        """Return the predicted seconds on each stage."""
        if isinstance(work, MixedWork):
            return self._by_stage(lambda stage: self._mixed[stage].seconds(work))
        estimators = self._estimators(work.phase)
        return self._by_stage(lambda stage: estimators[stage].seconds(work.size, work.kv_tokens))

    def expect_fill(self, step_tokens: int) -> None:
        """Expect prompt tokens to fill the next steps up to this many tokens; with 0, that they only decode."""
        if step_tokens == self._fill_tokens:
            return
        self._fill_tokens = step_tokens
        self._batches = self.decode
        if step_tokens:
            self._batches = tuple(
                FilledEstimator(decode, prefill, step_tokens, stage.mixed_scales)
                for decode, prefill, stage in zip(self.decode, self.prefill, self._stages, strict=True)
            )

    def decode_seconds(self, num_requests: int, kv_tokens: int) -> float:
        """Return the predicted seconds of a batch's step on the slowest stage."""
        return max([self._batches[stage].seconds(num_requests, kv_tokens) for stage in self._firsts])

    def decode_marginal_s(self, num_requests: int, kv_tokens: int) -> float:
        """Return the seconds that one more request of this length adds to the slowest stage, at this batch size."""
        estimators = [self._batches[stage] for stage in self._firsts]
        return max([e.alpha_s(num_requests) + e.beta_s * kv_tokens for e in estimators])

    def slowest_decode(self, stage_s: tuple[float, ...]) -> OnlineEstimator | FilledEstimator:
        """Return the estimator of a batch's step on the stage that bounds the pipeline."""
        return self._batches[max(range(len(stage_s)), key=stage_s.__getitem__)]

    def budget_blocks(self, stage_s: tuple[float, ...]) -> int:
        """Return the minimum over the stages of B_s·T̂_s/κ_s, in whole blocks."""
        return min(
            int(rate.bytes_per_s * seconds / (stage.kv_bytes_per_token * self._block_tokens))
            for rate, seconds, stage in zip(self.h2d, stage_s, self._stages, strict=True)
        )

    # What was measured.

    def remember(self, step_id: StepId, work: Work, budget_blocks: int) -> None:
        """Keep a planned step's inputs until its times arrive, if they ever do."""
        self._untimed[step_id] = _of_one_kind(work) or work
        self._budgets[step_id] = budget_blocks
        for kept in (self._untimed, self._budgets):
            if len(kept) > self.MAX_UNTIMED:
                kept.popitem(last=False)

    def forget(self, step_id: StepId) -> None:
        """Drop the inputs of a step that did not run as planned, so that its time is ignored."""
        self._untimed.pop(step_id, None)

    def take_profile(self) -> Profile:
        """Return what was timed since the last call."""
        profile = Profile([*self.timed_steps], [*self.timed_copies])
        self.timed_steps.clear()
        self.timed_copies.clear()
        return profile

    def observe_step(self, event: StepTimed) -> None:
        self._check_stages(event.stage_s)
        work = self._untimed.pop(event.step_id, None)
        if work is None:
            return
        self.last_step_s, self.last_predicted_s = max(event.stage_s), max(self.predict(work))
        self.timed_steps.append(TimedStep(work=work, stage_s=event.stage_s))
        if isinstance(work, MixedWork):
            for mixed, seconds in zip(self._mixed, event.stage_s, strict=True):
                mixed.observe(work, seconds)
        else:
            for estimator, seconds in zip(self._estimators(work.phase), event.stage_s, strict=True):
                estimator.observe(work.size, work.kv_tokens, seconds)
        self._group_stages()

    def observe_transfer(self, event: TransferTimed) -> None:
        self._check_stages(event.stage_s)
        self.timed_copies.append(TimedCopy(num_blocks=event.num_blocks, stage_s=event.stage_s))
        budget = self._budgets.pop(event.step_id, None)
        # A copy of few blocks measures its latency, not the link.
        if budget is None or event.num_blocks < max(1, budget / 2):
            return
        for rate, seconds, stage in zip(self.h2d, event.stage_s, self._stages, strict=True):
            rate.observe(event.num_blocks * self._block_tokens * stage.kv_bytes_per_token, seconds)

    def _check_stages(self, stage_s: tuple[float, ...]) -> None:
        if len(stage_s) != len(self._stages):
            raise ValueError(f"{len(stage_s)} times for {len(self._stages)} stages")

    def decode_error(self) -> tuple[PredictionError, ...]:
        """Return each stage's errors of the decode predictions over the last steps."""
        return tuple(estimator.error() for estimator in self.decode)


def _of_one_kind(work: Work) -> PhaseWork | None:
    """Return the work of a mixed step that only decodes or only computes prompt tokens; None for any other work."""
    if isinstance(work, MixedWork) and not work.prompt_tokens:
        return PhaseWork(phase=Phase.DECODE, size=work.num_decodes, kv_tokens=work.kv_tokens)
    if isinstance(work, MixedWork) and not work.num_decodes:
        return PhaseWork(phase=Phase.PREFILL, size=work.prompt_tokens, kv_tokens=work.token_pairs)
    return None
