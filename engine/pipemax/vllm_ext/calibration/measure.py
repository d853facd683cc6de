"""Measure step times and copies on a running engine under PipeMax.

``pipemax check-node`` does this, and so does an engine at its start if nothing is known of it. Waves of random prompts
(``control.times.profiling`` designs them) run through the engine's own scheduler and workers, which report each step's
time; so what is measured is what will be predicted. The engine must have nothing else to do.
"""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from random import Random
from statistics import median

from pipemax.config import BatchingChoice, EngineConfig, Policy
from pipemax.control.controller_config import StageConfig
from pipemax.control.times.calibration import GOOD_SHARE, Calibration
from pipemax.control.times.mixed_profiling import (
    describe_scales,
    mixed_rows,
    with_mixed_scales,
)
from pipemax.control.times.profiling import (
    WAVE_OUTPUT_TOKENS,
    TimedStep,
    Wave,
    WaveLimits,
    affordable_wave_tokens,
    design_waves,
    fit_stages,
    predicted_and_measured,
    prediction_error,
    round_trip_s,
)
from pipemax.domain.plan import Batching, Phase
from pipemax.domain.step_times import DECODE_SHARES
from pipemax.sim.measured_engine import MeasuredEngine
from pipemax.vllm_ext.core_calls import recalibrate, separated, take_profile, use_batching
from pipemax.vllm_ext.launch.forecast import measured_engine, runtime_settings
from pipemax.vllm_ext.launch.known_calibration import (
    block_tables,
    device_name,
    known_calibration,
    model_name,
    remember_calibration,
)
from pipemax.vllm_ext.runtime_settings import RuntimeSettings
from pipemax.vllm_ext.seam.vllm_types import (
    VLLM_VERSION,
    LLMEngine,
    RequestOutputKind,
    SamplingParams,
    VllmConfig,
    tokens_input,
)

log = logging.getLogger(__name__)

_FEWEST_WAVES = 4
"""A single request, and the largest batch of each context: they may take twice the limit."""
_MIXED_TIME = 1 / 3
"""Of the limit, for mixed steps."""
_MOST_LIMITS = 3
"""A calibration goes on while it is a guess, for at most so many times the limit."""
_OTHER_REQUESTS = 48
"""Whose steps judge a calibration that was not fitted to them."""
_LEAST_TOKEN_ID, _MOST_TOKEN_ID = 10, 30_000
"""Special tokens usually have the lowest ids; what a token means does not matter here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A calibration, and what it was fitted to."""

    calibration: Calibration
    steps: tuple[TimedStep, ...]


def measure(
    engine: LLMEngine,
    vllm_config: VllmConfig,
    config: EngineConfig,
    *,
    time_limit_s: float,
) -> Measurement:
    """Run waves until all are done or the time is up, and fit a calibration to them.

    Waves are sized by the time that a first one takes. One that runs beyond ``time_limit_s`` is ended, one of the first
    few at twice the limit. While the fit misses too many of its steps, the waves run again, until three times the
    limit. Decode and prefill steps are measured first, with batching separated; then, unless the config separates them
    too, mixed steps in a third of the limit more.
    ``ValueError`` if a phase was left without a step.
    """
    with separated(engine, config):
        measured = _measure(engine, vllm_config, config, time_limit_s=time_limit_s)
        if config.batching is not BatchingChoice.SEPARATED:
            measured = _with_mixed_steps(
                engine, vllm_config, measured, time_limit_s=_MIXED_TIME * time_limit_s
            )
    return measured


def _with_mixed_steps(
    engine: LLMEngine, vllm_config: VllmConfig, measured: Measurement, *, time_limit_s: float
) -> Measurement:
    """Measure mixed steps with several shares of decodes, and fit to them what prompt tokens add to decodes."""
    begin_s = time.monotonic()
    limits, runner, rng = wave_limits(vllm_config), _WaveRunner(engine, vllm_config), Random(1)
    most_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    steps = list[TimedStep]()
    recalibrate(engine, measured.calibration.stages)
    take_profile(engine)
    for number, share in enumerate(DECODE_SHARES, 1):
        mix = mixed_rows(limits, share, most_step_tokens=most_tokens, rng=rng)
        use_batching(engine, Batching.MIXED, mix.step_tokens)
        runner.run_lengths(mix.lengths, until_s=begin_s + time_limit_s * number / len(DECODE_SHARES))
        steps += [step for step in take_profile(engine).steps if step.work.phase is Phase.MIXED]
    use_batching(engine, Batching.SEPARATED)
    stages = with_mixed_scales(measured.calibration.stages, steps)
    error = prediction_error(predicted_and_measured(stages, steps, Phase.MIXED))
    scales = max((stage.mixed_scales for stage in stages), key=lambda scales: max(scales) / min(scales))
    calibration = replace(
        measured.calibration,
        measured=f"{measured.calibration.measured}; {len(steps)} mixed steps, within 5 %: "
        f"{error.within_5_percent:.0%}, off by {error.mean:.0%} in the mean, prompt tokens cost "
        f"{describe_scales(scales)} times what they cost alone",
        stages=stages,
    )
    return Measurement(calibration=calibration, steps=(*measured.steps, *steps))


def _measure(
    engine: LLMEngine,
    vllm_config: VllmConfig,
    config: EngineConfig,
    *,
    time_limit_s: float,
) -> Measurement:
    settings = runtime_settings(vllm_config)
    runner = _WaveRunner(engine, vllm_config)
    limits = wave_limits(vllm_config)
    # The first steps of all warm up, and may compile: they are not measured.
    runner.run(design_waves(limits)[0], until_s=time.monotonic() + 4 * time_limit_s)
    take_profile(engine)
    begin_s = time.monotonic()
    limits = _affordable(runner, limits, time_limit_s=time_limit_s, until_s=begin_s + 2 * time_limit_s)
    waves = _TimedWaves(engine, runner, settings)
    for turn in range(1, _MOST_LIMITS + 1):
        waves.run(design_waves(limits), begin_s=begin_s, time_limit_s=time_limit_s, turn=turn)
        stages = waves.fit(vllm_config.cache_config.block_size)
        error = prediction_error(predicted_and_measured(stages, waves.steps, Phase.DECODE))
        seconds = time.monotonic() - begin_s
        if error.within_5_percent >= GOOD_SHARE:
            break
    calibration = Calibration(
        device=device_name(),
        model=model_name(config),
        measured=f"{datetime.now(UTC):%Y-%m-%d} in {seconds:.0f} s with vLLM {VLLM_VERSION}: "
        f"{len(waves.steps)} steps, {len(waves.copies)} copies"
        f"{'' if waves.copies else ' (so the bandwidth is a guess)'}; decode steps within 5 %: "
        f"{error.within_5_percent:.0%}, off by {error.mean:.0%} in the mean and {error.worst:.0%} at worst",
        stages=stages,
        round_trip_s=median(waves.round_trips_s) if waves.round_trips_s else 0.0,
        tensor_parallel=vllm_config.parallel_config.tensor_parallel_size,
        within_5_percent=round(error.within_5_percent, 4),
    )
    return Measurement(calibration=calibration, steps=tuple(waves.steps))


class _TimedWaves:
    """Runs waves, and keeps what was timed of all of them."""

    def __init__(self, engine: LLMEngine, runner: "_WaveRunner", settings: RuntimeSettings) -> None:
        self._engine = engine
        self._runner = runner
        self._settings = settings
        profile = take_profile(engine)
        self.steps, self.copies = profile.steps, profile.copies
        self.round_trips_s: list[float] = []

    def run(self, waves: Sequence[Wave], *, begin_s: float, time_limit_s: float, turn: int) -> None:
        """Run waves until so many times the limit since ``begin_s``; the first few of all until twice the limit."""
        for index, wave in enumerate(waves):
            is_needed = turn == 1 and index < _FEWEST_WAVES
            until_s = begin_s + (max(2, turn) if is_needed else turn) * time_limit_s
            if time.monotonic() > until_s:
                return
            token_gaps_s = self._runner.run(wave, until_s=until_s)
            profile = take_profile(self._engine)
            self.steps += profile.steps
            self.copies += profile.copies
            batches = min(wave.num_requests, self._settings.num_batches)
            if batches <= len(self._settings.stages):  # with more, a batch also waits for others
                self.round_trips_s += round_trip_s(token_gaps_s, profile.steps, num_batches=batches)

    def fit(self, block_tokens: int) -> tuple[StageConfig, ...]:
        """Return each stage's coefficients. ``ValueError`` if a phase was left without a step."""
        return fit_stages(
            self.steps,
            self.copies,
            kv_bytes_per_token=[stage.kv_bytes_per_token for stage in self._settings.stages],
            block_tokens=block_tokens,
            default_h2d_bytes_per_s=min(stage.h2d_bytes_per_s for stage in self._settings.stages),
        )


def _affordable(
    runner: "_WaveRunner", limits: WaveLimits, *, time_limit_s: float, until_s: float
) -> WaveLimits:
    """Return the limits of waves that the time suffices for, by how long one takes with a request in each batch."""
    prompt_tokens = max(1, min(limits.max_model_len - WAVE_OUTPUT_TOKENS, 512))
    probe = Wave(num_requests=limits.num_batches, prompt_tokens=prompt_tokens)
    begin_s = time.monotonic()
    runner.run(probe, until_s=until_s)
    tokens = affordable_wave_tokens(probe, time.monotonic() - begin_s, time_limit_s=time_limit_s)
    return replace(limits, most_wave_tokens=tokens)


def calibrate_at_start(
    engine: LLMEngine, vllm_config: VllmConfig, config: EngineConfig
) -> MeasuredEngine | None:
    """Return what is known of an engine under PipeMax that has just started; measure it first if nothing is.

    ``None`` under stock vLLM, or if nothing is to be measured, or could be.
    """
    if vllm_config.kv_transfer_config is None or config.policy is not Policy.PIPEMAX:
        return None
    calibration = known_calibration(config, vllm_config)
    if calibration is not None:
        log.info("step times by a calibration of %s", calibration.measured)
    elif config.calibrate_at_start_s > 0:
        calibration = _calibrate_now(engine, vllm_config, config)
    if calibration is None:
        return None
    recalibrate(engine, calibration.stages)
    return measured_engine(vllm_config, calibration, gpu_blocks=vllm_config.cache_config.num_gpu_blocks or 0)


def _calibrate_now(engine: LLMEngine, vllm_config: VllmConfig, config: EngineConfig) -> Calibration | None:
    log.info(
        "nothing is known of this engine's step times: measuring for %.0f s", config.calibrate_at_start_s
    )
    try:
        calibration = measure(
            engine, vllm_config, config, time_limit_s=config.calibrate_at_start_s
        ).calibration
    except ValueError as error:
        log.warning("the engine could not be calibrated, and learns while it runs: %s", error)
        return None
    log.info("calibrated: %s", calibration.measured)
    if calibration.is_guess:
        log.warning(
            "step times vary on this machine: the calibration predicts %.0f%% of its decode steps within 5 %% and "
            "counts as a guess; `pipemax check-node --seconds 300` measures for longer",
            100 * (calibration.within_5_percent or 0.0),
        )
    remember_calibration(config, vllm_config, calibration)
    return calibration


def run_other(engine: LLMEngine, vllm_config: VllmConfig, config: EngineConfig) -> list[TimedStep]:
    """Run requests of many lengths at once, with batching separated. Return their steps, which were not fitted."""
    rng = Random(1)
    longest = min(vllm_config.model_config.max_model_len // 2, 512)
    lengths = [(rng.randint(8, longest), rng.randint(8, min(64, longest))) for _ in range(_OTHER_REQUESTS)]
    with separated(engine, config):
        take_profile(engine)
        _WaveRunner(engine, vllm_config).run_lengths(lengths)
        return take_profile(engine).steps


def wave_limits(vllm_config: VllmConfig) -> WaveLimits:
    """Return the limits of an engine that has started, so that its pools are known."""
    cache, settings = vllm_config.cache_config, runtime_settings(vllm_config)
    num_tables = block_tables(vllm_config).count
    return WaveLimits(
        num_batches=settings.num_batches,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=vllm_config.model_config.max_model_len,
        gpu_kv_tokens=(cache.num_gpu_blocks or 0) * cache.block_size // num_tables,
        host_kv_tokens=settings.host_kv_tokens // num_tables,
    )


def random_tokens(rng: Random, count: int, vocabulary: int) -> list[int]:
    """Return random token ids, so that no two prompts share a prefix: a found prefix would not be computed."""
    highest = min(_MOST_TOKEN_ID, vocabulary - 1)
    lowest = min(_LEAST_TOKEN_ID, highest)
    return [rng.randint(lowest, highest) for _ in range(count)]


class _WaveRunner:
    """Sends requests of given lengths and steps the engine until they have ended."""

    def __init__(self, engine: LLMEngine, vllm_config: VllmConfig) -> None:
        self._engine = engine
        self._vocabulary = vllm_config.model_config.get_vocab_size()
        self._rng = Random(0)
        self._numbers = iter(range(1 << 62))

    def run(self, wave: Wave, *, until_s: float = math.inf) -> list[float]:
        """Run the wave. Return the seconds between the tokens as they come out."""
        return self.run_lengths(
            [(wave.prompt_tokens, wave.output_tokens)] * wave.num_requests, until_s=until_s
        )

    def run_lengths(self, lengths: list[tuple[int, int]], *, until_s: float = math.inf) -> list[float]:
        """Run requests of these (prompt, output) tokens; give up what has not ended by ``until_s`` (monotonic)."""
        names: list[str] = []
        for prompt_tokens, output_tokens in lengths:
            sampling = SamplingParams(
                max_tokens=output_tokens,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            prompt = random_tokens(self._rng, prompt_tokens, self._vocabulary)
            names.append(f"calibrate-{next(self._numbers)}")
            self._engine.add_request(names[-1], tokens_input(prompt), sampling)
        heard_s: list[float] = []
        while self._engine.has_unfinished_requests():
            if time.monotonic() > until_s:
                self._engine.abort_request(names)
                break
            if self._engine.step():
                heard_s.append(time.perf_counter())
        return [after - before for before, after in pairwise(heard_s)]
