"""Copy engines: first in, first out; shared caps hold; a piece costs."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemax.domain.specs import NodeSpec
from pipemax.presets import load_node
from pipemax.sim.event_queue import EventQueue, Priority
from pipemax.sim.links import CopySpan, Direction, Links, fair_rates

H2D, D2H = Direction.HOST_TO_GPU, Direction.GPU_TO_HOST


def node_with(
    *,
    link: float = 10.0,
    duplex: float = 20.0,
    root: float = 100.0,
    dram: float = 1000.0,
    gpus_per_root: int = 1,
    per_copy_s: float = 0.0,
) -> NodeSpec:
    """Rates in bytes per second that are easy to reckon with."""
    node = load_node("rtx5090x8")
    return replace(
        node,
        num_gpus=4,
        gpus_per_root=gpus_per_root,
        root_bytes_per_s=root,
        host_dram_bytes_per_s=dram,
        link=replace(
            node.link,
            host_to_gpu_bytes_per_s=link,
            gpu_to_host_bytes_per_s=link,
            duplex_bytes_per_s=duplex,
            per_copy_s=per_copy_s,
        ),
    )


def copies(node: NodeSpec, *wanted: tuple[int, Direction, float]) -> list[CopySpan]:
    """All queued at time 0; their spans in the order in which they ended."""
    spans: list[CopySpan] = []
    queue = EventQueue()
    links = Links(queue, node, on_span=spans.append)
    for gpu, direction, num_bytes in wanted:
        links.copy(gpu, direction, num_bytes=num_bytes, num_pieces=1, on_done=lambda: None)
    queue.run()
    return spans


def test_one_engine_copies_in_order_and_each_direction_has_its_own() -> None:
    spans = copies(node_with(), (0, H2D, 100.0), (0, H2D, 50.0), (0, D2H, 50.0))
    assert [(span.direction, span.start_s, span.end_s) for span in spans] == [
        (D2H, 0.0, 5.0),
        (H2D, 0.0, 10.0),
        (H2D, 10.0, 15.0),
    ]


def test_pieces_add_their_cost() -> None:
    queue, ends = EventQueue(), list[float]()
    links = Links(queue, node_with(per_copy_s=0.5))
    links.copy(0, H2D, num_bytes=100.0, num_pieces=4, on_done=lambda: ends.append(queue.now_s()))
    queue.run()
    assert ends == [pytest.approx(12.0)]


def test_host_dram_is_shared_and_given_back() -> None:
    # Two copies of 10 bytes/s each under a cap of 10: half speed until the short one ends.
    spans = copies(node_with(dram=10.0), (0, H2D, 50.0), (1, H2D, 100.0))
    assert [span.end_s for span in spans] == [pytest.approx(10.0), pytest.approx(15.0)]


def test_gpus_behind_one_root_share_it() -> None:
    spans = copies(node_with(root=10.0, gpus_per_root=2), (0, H2D, 50.0), (1, H2D, 50.0), (2, H2D, 50.0))
    assert sorted(span.end_s for span in spans) == [
        pytest.approx(5.0),
        pytest.approx(10.0),
        pytest.approx(10.0),
    ]


def test_both_directions_share_the_duplex_cap() -> None:
    spans = copies(node_with(duplex=15.0), (0, H2D, 75.0), (0, D2H, 75.0))
    assert [span.end_s for span in spans] == [pytest.approx(10.0), pytest.approx(10.0)]


def test_queued_seconds_count_down() -> None:
    queue = EventQueue()
    links = Links(queue, node_with())
    seen: list[float] = []
    for num_bytes in (100.0, 50.0):
        links.copy(0, H2D, num_bytes=num_bytes, num_pieces=1, on_done=lambda: None)
    queue.at(4.0, Priority.DECIDE, lambda: seen.append(links.queued_s(0, H2D)))
    queue.run()
    assert seen == [pytest.approx(11.0)]
    assert links.queued_s(0, H2D) == 0.0


@given(
    peaks=st.lists(st.floats(1.0, 100.0), min_size=1, max_size=8),
    link_cap=st.floats(1.0, 100.0),
    dram_cap=st.floats(1.0, 300.0),
)
def test_fair_rates_stay_under_every_cap_and_waste_none(
    peaks: list[float], link_cap: float, dram_cap: float
) -> None:
    caps = [link_cap] * len(peaks) + [dram_cap]
    caps_of = [(flow, len(peaks)) for flow in range(len(peaks))]
    rates = fair_rates(peaks, caps_of, caps)
    assert all(rate <= min(peak, link_cap) * (1 + 1e-9) for rate, peak in zip(rates, peaks, strict=True))
    assert sum(rates) <= dram_cap * (1 + 1e-9)
    wanted = sum(min(peak, link_cap) for peak in peaks)
    assert sum(rates) == pytest.approx(min(wanted, dram_cap))


@given(
    wanted=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(list(Direction)), st.floats(1.0, 500.0)),
        min_size=1,
        max_size=20,
    ),
    dram=st.floats(5.0, 60.0),
    duplex=st.floats(10.0, 20.0),
)
def test_any_copies_obey_the_caps_and_stay_in_order(
    wanted: list[tuple[int, Direction, float]], dram: float, duplex: float
) -> None:
    spans = copies(node_with(dram=dram, duplex=duplex), *wanted)
    assert len(spans) == len(wanted)
    end_s = max(span.end_s for span in spans)
    assert sum(span.num_bytes for span in spans) <= dram * end_s * (1 + 1e-6)
    for gpu in range(4):
        for direction in Direction:
            own = [s for s in spans if (s.gpu, s.direction) == (gpu, direction)]
            assert [s.num_bytes for s in own] == [b for g, d, b in wanted if (g, d) == (gpu, direction)]
            assert all(a.end_s == b.start_s for a, b in itertools.pairwise(own))
            assert all(s.end_s - s.start_s >= s.num_bytes / 10.0 * (1 - 1e-6) for s in own)
