"""The models of chunks and slots drive the job's own decisions: slow nodes hold up no others, short rows come last."""

from lab.nights import budget, canary, tail
from lab.nights.chunks import Model, Outcome


def night(*, slow_by: float, max_in_flight: int) -> Outcome:
    return Model(
        nodes=20, slow_nodes=1, slots=4, hours=6.0, slow_by=slow_by, max_in_flight=max_in_flight, seed=0
    ).run()


def test_nodes_that_are_alike_are_never_without_rows() -> None:
    even = night(slow_by=1.0, max_in_flight=2)
    assert even.lost_share < 0.01
    assert 6.0 <= even.hours < 6.5


def test_a_slow_node_costs_the_others_time_only_where_few_chunks_may_be_in_flight() -> None:
    few, many = (night(slow_by=10.0, max_in_flight=count) for count in (2, 6))
    assert few.lost_share > 0.5
    assert many.lost_share < 0.01
    assert many.most_in_flight > few.most_in_flight == 2


def lost(order: str, *, rows: int = 1_000, running: int = 64, correlation: float = 0.6) -> float:
    return tail.Model(
        rows=rows, engines=1, running=running, correlation=correlation, order=order, seed=0
    ).run()


def test_a_table_of_one_chunk_loses_less_at_its_end_where_the_correlation_is_known_beforehand() -> None:
    assert lost("known") < lost("shortest") / 2
    assert lost("known", correlation=0.0) == lost("shortest", correlation=0.0)


def test_the_end_of_a_long_table_costs_little_in_any_order() -> None:
    assert lost("answers") < 0.01
    assert 0 <= lost("shortest", rows=30_000) < 0.02


def test_a_canary_raises_few_false_alarms_and_notices_a_tenth_of_wrong_labels() -> None:
    assert canary.share_of_alarms("five labels", "none", rows=500, nights=100) <= 0.05
    assert canary.share_of_alarms("five labels", "shuffled", rows=500, nights=100) >= 0.95


def test_nights_end_at_their_limit_and_leave_little_of_it_unused() -> None:
    ended = [
        night for night in budget.measure(range(40)) if night.ended_by != "done"
    ]  # it checks what is over
    assert len(ended) > 20
    assert sorted(night.unused_share for night in ended)[len(ended) // 2] < 0.02
    assert all(night.warned_at is not None for night in ended)
