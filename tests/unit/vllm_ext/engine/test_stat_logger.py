"""vLLM's word after each step, as phases and as an account of time."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemax.vllm_ext.engine.admission import AdmissionBook
from pipemax.vllm_ext.engine.stat_logger import EngineLedger, StatLogger
from pipemax.vllm_ext.engine.time_account import TimeAccount, TimePart


class Bench:
    """A logger whose clock a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0
        admission = AdmissionBook(100, scheduler_reports=True)
        admission.submit("a", prompt_tokens=1, most_output_tokens=0)
        self.ledger = EngineLedger(time=TimeAccount(0.0), admission=admission)
        self._logger = StatLogger(self.ledger, clock=lambda: self.now_s)

    def step(
        self, seconds: float, *, prompt: int = 0, output: int = 0, waiting: int = 1, **counts: Any
    ) -> None:
        self.now_s += seconds
        self._logger.record(
            SimpleNamespace(
                prefix_cache_stats=SimpleNamespace(queries=0, hits=0),
                num_running_reqs=1,
                num_waiting_reqs=waiting,
                kv_cache_usage=0.5,
                kv_connector_stats=counts or None,
            ),
            SimpleNamespace(num_preempted_reqs=0, num_prompt_tokens=prompt, num_generation_tokens=output),
        )

    def drain_s(self) -> tuple[float, float]:
        """The drain's seconds, and what they would have been at the full rate."""
        metrics = self.ledger.stats().metrics
        return metrics["time_drain_s"], metrics["drain_at_full_rate_s"]

    def parts(self) -> dict[str, float]:
        figures = self.ledger.time.figures()
        return {part: seconds for part in TimePart if (seconds := figures[f"time_{part}_s"])}


def test_steps_of_stock_vllm_go_to_the_phases_by_their_tokens() -> None:
    bench = Bench()
    bench.step(1.0)  # a part of a prompt
    bench.step(4.0, prompt=300, output=100)
    bench.step(2.0, output=64)
    assert bench.ledger.latest.phase == "decode"
    bench.step(3.0, output=64, waiting=0)
    assert bench.parts() == {TimePart.PREFILL: 4.0, TimePart.DECODE: 3.0, TimePart.DRAIN: 3.0}
    assert bench.ledger.latest.metrics["measured_step_s"] == 3.0


def test_the_drain_s_tokens_are_rated_as_those_before_it() -> None:
    bench = Bench()
    bench.step(1.0, prompt=300)
    bench.step(3.0, output=400)
    assert bench.drain_s() == (0.0, 0.0)
    bench.step(2.0, output=30, waiting=0)
    bench.step(2.0, output=20, waiting=0)
    assert bench.drain_s() == (4.0, pytest.approx(50 * 4.0 / 400))


def test_where_all_decode_is_drain_no_faster_rate_is_claimed() -> None:
    bench = Bench()
    bench.step(5.0, prompt=3_000, output=3)
    bench.step(2.0, output=300, waiting=0)
    bench.step(3.0, output=100, waiting=0)
    assert bench.drain_s() == (5.0, pytest.approx(5.0))


def test_while_input_may_come_batches_do_not_drain() -> None:
    bench = Bench()
    bench.ledger.input_open = True
    bench.step(3.0, output=64, waiting=0)
    assert bench.parts() == {TimePart.DECODE: 3.0}


def _pipemax(**changes: float) -> dict[str, float]:
    return {
        "awaits_input": 0.0,
        "is_decode_phase": 1.0,
        "parked_requests": 0.0,
        "prefetch_stall_s": 0.0,
        "admission_demand_tokens": 70.0,
        "kv_tokens_per_request": 10.0,
        "known_requests": 0.0,
    } | changes


def test_mixed_steps_of_pipemax_are_divided_by_their_tokens() -> None:
    bench = Bench()
    bench.step(4.0, prompt=300, output=100, **_pipemax(is_decode_phase=0.0, is_mixed_batching=1.0))
    assert bench.ledger.latest.phase == "mixed"
    bench.step(2.0, output=5, **_pipemax(is_mixed_batching=1.0, prefetch_stall_s=0.5))
    assert bench.parts() == {
        TimePart.PREFILL: pytest.approx(3.0),
        TimePart.DECODE: pytest.approx(2.5),
        TimePart.PREFETCH_STALL: pytest.approx(0.5),
    }


def test_the_figures_of_a_user_s_own_kv_connector_are_left_alone() -> None:
    bench = Bench()
    bench.step(2.0, output=64, GPU_to_CPU=[{"op_size": 4_096, "op_time": 0.01}])
    assert bench.parts() == {TimePart.DECODE: 2.0}
    assert "GPU_to_CPU" not in bench.ledger.latest.metrics


def test_steps_of_pipemax_are_classified_by_its_scheduler() -> None:
    bench = Bench()
    bench.step(1.0, **_pipemax(is_decode_phase=0.0))
    bench.step(2.0, **_pipemax(is_decode_phase=0.0, awaits_input=1.0))
    assert bench.ledger.latest.phase == "idle"
    bench.step(3.0, output=5, **_pipemax(prefetch_stall_s=0.75))
    bench.step(3.0, output=5, **_pipemax(prefetch_stall_s=0.75))
    bench.step(1.0, output=5, waiting=0, **_pipemax(prefetch_stall_s=3.0))
    assert bench.parts() == {
        TimePart.PREFILL: 1.0,
        TimePart.WAITING_FOR_INPUT: 2.0,
        TimePart.DECODE: pytest.approx(5.25),
        TimePart.PREFETCH_STALL: pytest.approx(1.75),
    }
    assert sum(bench.parts().values()) == pytest.approx(bench.now_s)
    assert bench.ledger.admission is not None
    assert bench.ledger.admission.credit_tokens() == 60, "70, and one request is unknown"


def test_a_round_that_fits_the_host_pool_drains_once_nothing_is_parked() -> None:
    """As on an H100: 300 rows in memory at once, batches of 28, nothing waits, and all of it takes 17 s."""
    bench = Bench()
    for _ in range(20):
        bench.step(0.1, prompt=4_800, waiting=0, **_pipemax(is_decode_phase=0.0))
    for parked in (*range(272, 0, -1), *[0] * 28):
        bench.step(0.05, output=28 if parked else 14, waiting=0, **_pipemax(parked_requests=float(parked)))
    assert bench.parts() == {
        TimePart.PREFILL: pytest.approx(2.0),
        TimePart.DECODE: pytest.approx(272 * 0.05),
        TimePart.DRAIN: pytest.approx(28 * 0.05),
    }
    drain_s, at_full_rate_s = bench.drain_s()
    assert 0.5 * drain_s <= at_full_rate_s <= drain_s


@st.composite
def _steps(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a step's report: of stock vLLM, or of PipeMax in any phase."""
    step: dict[str, Any] = {
        "seconds": draw(st.floats(0.0, 3.0)),
        "prompt": draw(st.sampled_from([0, 1, 5_000])),
        "output": draw(st.sampled_from([0, 1, 28, 1_024])),
        "waiting": draw(st.sampled_from([0, 0, 3])),
    }
    if draw(st.booleans()):
        phase = draw(st.sampled_from(["decode", "decode", "mixed", "prefill", "awaits"]))
        step |= _pipemax(
            is_decode_phase=float(phase == "decode"),
            is_mixed_batching=float(phase == "mixed"),
            awaits_input=float(phase == "awaits"),
            parked_requests=draw(st.sampled_from([0.0, 0.0, 250.0])),
            prefetch_stall_s=draw(st.floats(0.0, 100.0)),
        )
    return step


@given(st.lists(st.lists(_steps(), max_size=12), min_size=1, max_size=4), st.lists(st.booleans(), min_size=4))
def test_each_round_s_parts_sum_to_its_length_and_its_drain_is_no_faster_at_the_full_rate(
    rounds: list[list[dict[str, Any]]], input_open: list[bool]
) -> None:
    bench = Bench()
    for steps, is_open in zip(rounds, input_open, strict=False):
        began_s, parts_before = bench.now_s, sum(bench.parts().values())
        drain_before_s, at_full_rate_before_s = bench.drain_s()
        bench.ledger.input_open = is_open
        for step in steps:
            drained_s, _ = bench.drain_s()
            bench.step(**step)
            is_fed = is_open or step["waiting"] or step.get("parked_requests")
            assert bench.drain_s()[0] == drained_s or not is_fed
        length_s = bench.now_s - began_s
        drain_s, at_full_rate_s = bench.drain_s()
        assert sum(bench.parts().values()) - parts_before == pytest.approx(length_s, rel=0.01, abs=1e-6)
        assert 0.0 <= at_full_rate_s - at_full_rate_before_s <= drain_s - drain_before_s + 1e-6
