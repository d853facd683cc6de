"""``policy: auto`` starts the engine that it has chosen, with the settings that it has compared."""

from dataclasses import replace
from typing import Any

import pytest

from pipemax.config import EngineConfig, Policy
from pipemax.domain.errors import EngineStartError
from pipemax.domain.plan import Batching
from pipemax.policy import row_sample, start
from pipemax.policy.compare import ChosenPolicy, PolicyChoice
from pipemax.vllm_ext.launch.forecast import Forecast
from pipemax.vllm_ext.launch.known_check import CheckPart, NodeCheck, Verdict
from tests.unit.policy.test_row_sample import engine

ROWS = {"prompt_tokens": [300, 400], "max_tokens": 60}
KNOWN_ROWS = {**ROWS, "mean_output_tokens": 15.0, "rows": 600}


def record_starts(monkeypatch: pytest.MonkeyPatch, forecast: Forecast) -> list[EngineConfig]:
    """Return the configs of engines that are started from now on, after this forecast; none measures itself."""
    started: list[EngineConfig] = []

    class Engine:
        measured = check = None

        def __init__(self, config: EngineConfig) -> None:
            started.append(config)

    monkeypatch.setattr(start, "forecast", lambda config: forecast)
    monkeypatch.setattr(start, "VllmEngine", Engine)
    return started


@pytest.mark.parametrize(
    ("given", "chosen", "tokens"),
    [({}, Policy.VLLM, 2048), ({"max_num_batched_tokens": 4096}, Policy.PIPEMAX, 4096)],
)
def test_stock_vllm_runs_with_the_size_of_a_step_that_won_unless_the_user_named_one(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], chosen: Policy, tokens: int
) -> None:
    wide = replace(engine(stages=2, gpu_blocks=4_000), max_batched_tokens=4096)
    started = record_starts(monkeypatch, Forecast(engine=wide, num_stages=2))
    config = EngineConfig.parse({"model": "m", "policy": "auto", "row_lengths": KNOWN_ROWS, **given})
    start.start_engine(config)
    assert [(config.policy, config.max_num_batched_tokens) for config in started] == [(chosen, tokens)]


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({}, Policy.VLLM),
        pytest.param(
            {"vllm": {"disable_hybrid_kv_cache_manager": True}}, Policy.PIPEMAX, marks=pytest.mark.long
        ),
    ],
)
def test_stock_vllm_frees_what_has_left_a_window_unless_the_user_turns_that_off(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], chosen: Policy
) -> None:
    whole = engine(stages=4, gpu_blocks=400)
    windowed = whole.capacity.with_freed_windows([(0, 6), (6, 12)], (5, 11), window_tokens=32)
    measured = replace(whole, windowed_capacity=windowed)
    started = record_starts(monkeypatch, Forecast(engine=measured, num_stages=4))
    rows = {"prompt_tokens": [300], "max_tokens": 100, "mean_output_tokens": 100}
    start.start_engine(EngineConfig.parse({"model": "m", "policy": "auto", "row_lengths": rows, **given}))
    assert [config.policy for config in started] == [chosen]


class MeasuredEngine:
    """Stands for ``VllmEngine``: an engine that has measured itself."""

    check: NodeCheck | None = None
    measured = replace(engine(stages=4, gpu_blocks=400), max_batched_tokens=2048)

    def __init__(self, config: EngineConfig) -> None:
        self.batching: tuple[Batching, int | None] | None = None

    def use_batching(self, batching: Batching, mixed_step_tokens: int | None) -> None:
        self.batching = (batching, mixed_step_tokens)


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ({}, [Batching.MIXED]),
        # So few of the assumed rows fit that phases are simulated too.
        pytest.param({"row_lengths": None}, [*Batching], marks=pytest.mark.long),
        ({"row_lengths": {**ROWS, "mean_output_tokens": 15, "rows": 300}}, [*Batching]),
        ({"batching": "mixed"}, [Batching.MIXED]),
    ],
)
def test_what_the_config_leaves_open_of_the_batching_is_settled(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], allowed: list[Batching]
) -> None:
    monkeypatch.setattr(start, "VllmEngine", MeasuredEngine)
    config = EngineConfig.parse({"model": "m", "policy": "pipemax", "row_lengths": ROWS, **given})
    started = start.start_engine(config)
    told: Any = started.engine
    batching, tokens = told.batching
    assert batching in allowed
    assert (tokens is None) == (batching is Batching.SEPARATED)
    assert ("in phases" if tokens is None else "with mixed steps") in started.choice.reason


@pytest.mark.parametrize(
    "given", [{"batching": "mixed", "mixed_step_tokens": 200}, {"batching": "separated"}]
)
def test_nothing_is_simulated_where_nothing_of_the_batching_is_open(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    monkeypatch.setattr(start, "VllmEngine", MeasuredEngine)
    monkeypatch.setattr(row_sample, "choose_batching", lambda *_: pytest.fail("simulated for nothing"))
    config = EngineConfig.parse({"model": "m", "policy": "pipemax", "row_lengths": ROWS, **given})
    started = start.start_engine(config)
    told: Any = started.engine
    assert told.batching is None


def choice_of_auto(
    monkeypatch: pytest.MonkeyPatch, engine_type: type[MeasuredEngine], *, is_calibrated: bool
) -> PolicyChoice:
    """Have ``auto`` choose for rows for which PipeMax is the faster, before or after it has measured the engine."""
    expected = Forecast(engine=engine_type.measured if is_calibrated else None, num_stages=4)
    monkeypatch.setattr(start, "forecast", lambda config: expected)
    monkeypatch.setattr(start, "VllmEngine", engine_type)
    rows = {"prompt_tokens": [300], "max_tokens": 100, "mean_output_tokens": 100, "rows": 100}
    config = EngineConfig.parse({"model": "m", "policy": "auto", "row_lengths": rows})
    return start.start_engine(config).choice


@pytest.mark.parametrize(
    ("part", "chosen", "is_calibrated"),
    [
        ("poison", Policy.VLLM, True),
        ("tokens", Policy.PIPEMAX, False),
        pytest.param("poison", Policy.VLLM, False, marks=pytest.mark.long),
        pytest.param("tokens", Policy.PIPEMAX, True, marks=pytest.mark.long),
        pytest.param(None, Policy.PIPEMAX, False, marks=pytest.mark.long),
        pytest.param(None, Policy.PIPEMAX, True, marks=pytest.mark.long),
    ],
)
def test_auto_runs_pipemax_only_where_bytes_and_poison_were_shown(
    monkeypatch: pytest.MonkeyPatch, part: str | None, chosen: Policy, is_calibrated: bool
) -> None:
    """The engine checks itself at its start: the forecast knew of no check."""
    started: list[EngineConfig] = []
    parts = () if part is None else (CheckPart(name=part, verdict=Verdict.INCONCLUSIVE, detail="unlike"),)

    class Engine(MeasuredEngine):
        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config)
            started.append(config)
            own = NodeCheck(device="d", model="m", checked="today", seconds=1, parts=parts)
            self.check = own if config.policy is Policy.PIPEMAX else None

        def close(self) -> None:
            pass

    choice = choice_of_auto(monkeypatch, Engine, is_calibrated=is_calibrated)
    assert started[-1].policy is chosen
    assert ("inconclusive (poison: unlike)" in choice.reason) == (part == "poison")


@pytest.mark.parametrize("is_calibrated", [False, pytest.param(True, marks=pytest.mark.long)])
def test_auto_takes_stock_vllm_where_an_engine_under_pipemax_does_not_start(
    monkeypatch: pytest.MonkeyPatch, is_calibrated: bool
) -> None:
    class Engine(MeasuredEngine):
        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config)
            if config.policy is Policy.PIPEMAX:
                raise EngineStartError("this machine failed PipeMax's check (copies: 3 of 9 blocks differ)")

    choice = choice_of_auto(monkeypatch, Engine, is_calibrated=is_calibrated)
    assert choice.chosen is ChosenPolicy.VLLM
    assert "copies: 3 of 9 blocks differ" in choice.reason
