"""Prefill or decode, by memory; and how much input there is room for."""

from dataclasses import replace

import pytest

from pipemax.control.planners.phase import MemoryLoad, PhasePolicy
from pipemax.domain.plan import Phase, PhaseReason
from tests.unit.control.fake_engine import small_config

# 100 GPU blocks, 1000 on the host: high watermark 950, low one 150, a refill of at least 100.
POLICY = PhasePolicy(small_config())
FULL = MemoryLoad(
    num_waiting=50,
    waiting_blocks=2000,
    next_fits=False,
    num_prefilling=0,
    num_decodable=40,
    live_blocks=900,
    reserved_blocks=940,
    input_open=False,
    awaited_s=0.0,
)
DRAINED = replace(FULL, next_fits=True, live_blocks=140, reserved_blocks=300)


def chosen(phase: Phase, load: MemoryLoad) -> tuple[Phase, PhaseReason]:
    return POLICY.choose(phase, load)


def test_prefill_goes_on_while_the_next_request_stays_under_the_high_watermark() -> None:
    assert POLICY.admits(50, reserved_blocks=900, num_started=3)
    assert not POLICY.admits(51, reserved_blocks=900, num_started=3)
    load = replace(FULL, next_fits=True)
    assert chosen(Phase.PREFILL, load) == (Phase.PREFILL, PhaseReason.FILL_HOST)


def test_a_single_request_may_use_the_headroom() -> None:
    assert POLICY.admits(1000, reserved_blocks=0, num_started=0)


def test_started_prompts_are_completed_before_the_switch() -> None:
    load = replace(FULL, num_prefilling=1)
    assert chosen(Phase.PREFILL, load) == (Phase.PREFILL, PhaseReason.FINISH_PROMPTS)


def test_a_full_host_pool_switches_to_decode() -> None:
    assert chosen(Phase.PREFILL, FULL) == (Phase.DECODE, PhaseReason.HOST_FULL)


def test_input_used_up_switches_to_decode() -> None:
    load = replace(FULL, num_waiting=0, waiting_blocks=0)
    assert chosen(Phase.PREFILL, load) == (Phase.DECODE, PhaseReason.INPUT_USED_UP)


def test_open_input_is_awaited_for_a_while_where_there_is_room() -> None:
    load = replace(FULL, num_waiting=0, waiting_blocks=0, reserved_blocks=500, input_open=True)
    assert chosen(Phase.PREFILL, load) == (Phase.PREFILL, PhaseReason.AWAIT_INPUT)
    assert chosen(Phase.PREFILL, replace(load, awaited_s=1.1))[0] is Phase.DECODE
    assert chosen(Phase.PREFILL, replace(load, reserved_blocks=960))[0] is Phase.DECODE


def test_decode_goes_on_while_live_kv_is_above_the_low_watermark() -> None:
    load = replace(DRAINED, live_blocks=151)
    assert chosen(Phase.DECODE, load) == (Phase.DECODE, PhaseReason.KEEP_DECODING)


def test_live_kv_under_the_low_watermark_switches_back_to_prefill() -> None:
    assert chosen(Phase.DECODE, DRAINED) == (Phase.PREFILL, PhaseReason.LIVE_KV_LOW)


def test_too_little_room_or_input_is_no_reason_to_switch() -> None:
    crowded = replace(DRAINED, reserved_blocks=900)
    assert chosen(Phase.DECODE, crowded)[0] is Phase.DECODE
    trickle = replace(DRAINED, input_open=True, waiting_blocks=20)
    assert chosen(Phase.DECODE, trickle)[0] is Phase.DECODE
    assert chosen(Phase.DECODE, replace(trickle, live_blocks=70))[0] is Phase.PREFILL


def test_the_rest_of_the_input_is_begun_as_soon_as_all_of_it_fits() -> None:
    rest = replace(DRAINED, live_blocks=600, reserved_blocks=700, waiting_blocks=200)
    assert chosen(Phase.DECODE, rest) == (Phase.PREFILL, PhaseReason.REST_FITS)
    assert chosen(Phase.DECODE, replace(rest, input_open=True))[0] is Phase.DECODE


def test_without_decodable_requests_prefill_goes_on() -> None:
    load = replace(DRAINED, num_decodable=0)
    assert chosen(Phase.DECODE, load) == (Phase.PREFILL, PhaseReason.NOTHING_DECODABLE)


@pytest.mark.parametrize("phase", Phase)
def test_there_is_demand_for_input_up_to_the_high_watermark(phase: Phase) -> None:
    load = replace(FULL, num_waiting=0, waiting_blocks=30, reserved_blocks=200)
    expected = 950 - 30 - (200 if phase is Phase.PREFILL else 150)
    assert POLICY.admission_demand_blocks(phase, load) == expected


def test_the_demand_is_negative_where_more_waits_than_fits() -> None:
    assert POLICY.admission_demand_blocks(Phase.DECODE, FULL) == 950 - 150 - 2000
