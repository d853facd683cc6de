"""The model of chunks and slots drives the job's own decisions: a slow node holds up no other."""

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
