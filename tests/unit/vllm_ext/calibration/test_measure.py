"""How long a calibration may take, over an engine whose steps take time; and the limits that it designs waves by."""

import random
import time
from typing import Any

import pytest

from pipemax.config import EngineConfig
from pipemax.control.times.estimator import PhaseWork
from pipemax.control.times.profiling import Profile, TimedStep
from pipemax.domain.plan import Batching, Phase
from pipemax.vllm_ext import core_calls
from pipemax.vllm_ext.calibration import measure as measuring
from pipemax.vllm_ext.launch.forecast import measured_engine, runtime_settings
from pipemax.vllm_ext.launch.vllm_config import launch_environment, make_vllm_config
from tests.fakes.vllm_kinds import runner_version
from tests.unit.vllm_ext.fake_worker import MODEL


class SlowEngine:
    """Stands for ``LLMEngine``: each step takes its time and completes nothing."""

    def __init__(self) -> None:
        self.requests: set[str] = set()

    def add_request(self, name: str, prompt: Any, sampling: Any) -> None:
        self.requests.add(name)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def abort_request(self, names: list[str]) -> None:
        self.requests -= set(names)

    def step(self) -> list[Any]:
        time.sleep(0.02)
        return []


@pytest.fixture(scope="module")
def vllm_config() -> Any:
    config = EngineConfig(
        model=str(MODEL), policy="pipemax", max_model_len=512, max_num_seqs=8, num_batches=3
    )
    with launch_environment(config), runner_version(2):
        made = make_vllm_config(config)
    made.cache_config.num_gpu_blocks = 1000
    return made


def test_an_engine_that_is_too_slow_is_given_up_in_time(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "take_profile", lambda engine: Profile([], []))
    engine: Any = SlowEngine()
    config = EngineConfig(model=str(MODEL), policy="pipemax")
    with pytest.raises(ValueError, match="nothing was measured"):
        measuring.measure(engine, vllm_config, config, time_limit_s=0.2)
    assert not engine.requests, "what did not end is given up"


def test_a_calibration_goes_on_while_it_misses_its_own_steps(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine whose steps take no time: each profile has four steps that vary by the spread."""
    engine: Any = QuickEngine()
    config = EngineConfig(model=str(MODEL), policy="pipemax", batching="separated")

    def measured(spread: float) -> measuring.Measurement:
        rng = random.Random(0)

        def profile(engine: Any) -> Profile:
            off = [1e-2 * (1 + rng.choice((-1, 1)) * spread) for _ in range(4)]
            phases = (Phase.DECODE, Phase.DECODE, Phase.PREFILL, Phase.PREFILL)
            steps = [
                TimedStep(work=PhaseWork(phase=phase, size=8, kv_tokens=80), stage_s=(seconds,))
                for phase, seconds in zip(phases, off, strict=True)
            ]
            return Profile(steps, [])

        monkeypatch.setattr(measuring, "take_profile", profile)
        return measuring.measure(engine, vllm_config, config, time_limit_s=600.0)

    steady, varying = measured(0.01), measured(0.3)
    assert (steady.calibration.is_guess, varying.calibration.is_guess) == (False, True)
    # Each has four steps from before its first wave.
    assert len(varying.steps) - 4 == 3 * (len(steady.steps) - 4)
    assert "within 5 %" in varying.calibration.measured


class QuickEngine(SlowEngine):
    """Every request ends in its first step."""

    def step(self) -> list[Any]:
        self.requests.clear()
        return []


def test_an_engine_with_mixed_batching_separates_while_it_is_measured(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Batching] = []
    monkeypatch.setattr(
        core_calls, "use_batching", lambda engine, batching, tokens=None: told.append(batching)
    )
    monkeypatch.setattr(measuring, "take_profile", lambda engine: Profile([], []))
    config = EngineConfig(model=str(MODEL), policy="pipemax", batching="mixed")
    engine: Any = SlowEngine()
    with pytest.raises(ValueError, match="nothing was measured"):
        measuring.measure(engine, vllm_config, config, time_limit_s=0.1)
    assert told == [Batching.SEPARATED, Batching.MIXED]


def test_a_step_s_limit_is_not_the_number_of_slots(vllm_config: Any) -> None:
    assert vllm_config.scheduler_config.max_num_seqs > 8, "the V2 runner's slots"
    assert measuring.wave_limits(vllm_config).max_num_seqs == 8
    stages = (
        runtime_settings(vllm_config)
        .controller_config(gpu_blocks=10, block_tokens=16, prefill_chunk_tokens=64, max_slots=8)
        .stages
    )
    calibration: Any = type("Calibrated", (), {"stages": stages, "round_trip_s": 0.0, "is_guess": False})
    assert measured_engine(vllm_config, calibration, gpu_blocks=1000).max_num_seqs == 8
