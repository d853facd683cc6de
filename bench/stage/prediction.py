"""Predicts the same pipeline with the simulator, from this stage's profile and copy rate; no GPU is needed."""

from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from bench.stage.experiment import Outcome, Setup, controller_config
from pipemax.control.controller_config import StageConfig
from pipemax.domain.specs import KvCapacity
from pipemax.sim.measured_engine import MeasuredEngine
from pipemax.sim.result import DecodeSample
from pipemax.sim.systems.pipemax import PipeMaxSystem
from pipemax.sim.systems.pipemax_config import PipeMaxOptions
from pipemax.sim.systems.scenario import measured_scenario
from pipemax.sim.workloads import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The simulator's figures over the same decode steps as the measured outcome."""

    policy: str
    mean_batch: float
    step_ms: float
    tokens_per_s: float
    step_error: float
    """Predicted / measured − 1."""
    tokens_error: float


def predict(setup: Setup, stage: StageConfig, workload: Workload, outcome: Outcome) -> Prediction:
    """Simulate all stages with the measured one's times. Raise ``ValueError`` if the run is too short to compare."""
    config = controller_config(setup, outcome.policy, stage, workload.typical_output_tokens)
    engine = MeasuredEngine(
        stages=(stage,) * setup.num_stages,
        round_trip_s=0.0,
        capacity=KvCapacity(
            block_tokens=setup.block_tokens, gpu_blocks=config.gpu_blocks, host_blocks=config.host_blocks
        ),
        num_batches=setup.num_stages,
        max_num_seqs=config.max_num_seqs,
        max_batched_tokens=config.prefill_chunk_tokens,
        max_model_len=int((workload.prompt_tokens + workload.output_tokens).max()),
    )
    options = PipeMaxOptions(
        name=outcome.policy,
        controller={
            "initial_output_tokens": config.initial_output_tokens,
            "static_prefetch_fraction": config.static_prefetch_fraction,
        },
    )
    result = PipeMaxSystem(measured_scenario(engine, workload), options).simulate()
    return compare(outcome, counted_samples(result.recording.decode_samples, setup))


def counted_samples(samples: list[DecodeSample], setup: Setup) -> list[DecodeSample]:
    """Return the simulated steps that correspond to the measured run's counted ones; ``ValueError`` if too few."""
    counted = samples[setup.warm_up_steps : setup.decode_steps]
    if len(counted) < 2:
        raise ValueError(f"the simulated run has {len(samples)} decode steps: too few to compare")
    return counted


def compare(outcome: Outcome, samples: list[DecodeSample]) -> Prediction:
    """Compare simulated steps with the measured outcome.

    Steps follow each other on the last stage, so the time between two ends is a step's.
    """
    step_s = fmean(after.time_s - before.time_s for before, after in pairwise(samples))
    mean_batch = fmean(sample.batch for sample in samples)
    tokens_per_s = mean_batch / step_s
    return Prediction(
        policy=outcome.policy,
        mean_batch=mean_batch,
        step_ms=step_s * 1e3,
        tokens_per_s=tokens_per_s,
        step_error=step_s * 1e3 / outcome.step_ms - 1,
        tokens_error=tokens_per_s / outcome.tokens_per_s - 1,
    )
