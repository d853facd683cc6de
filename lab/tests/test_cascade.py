"""The simulation of cascades drives the product's own decisions, and notices who breaks the promise."""

import numpy as np
import pytest

from lab.cascade.tables import KINDS, STREAMS, make_table
from lab.cascade.trials import Ties, coins_of, labelled, make_draw, one_stream, one_table, passed, seed_of
from pipemax_spark.cascade.certificate import certify
from pipemax_spark.cascade.promise import Promise

PROMISE = Promise(agree=0.97, confidence=0.95)


@pytest.mark.parametrize("kind", ["ties: one decimal", "errors", "equal rows"])
def test_rows_that_pass_are_those_that_the_certificate_keeps(kind: str) -> None:
    rng = np.random.default_rng(7)
    table = make_table(kind, rng, 4_000, PROMISE)
    draw = make_draw(PROMISE, 4_000, seed_of(rng))
    ties, is_sampled = Ties(table, draw.seed), coins_of(draw.seed, table.requests) < draw.sample_share
    certificate = certify(draw, labelled(table, is_sampled, ties))
    kept = passed(table, certificate.cut, ties) & ~is_sampled
    assert kept.tolist() == [
        certificate.keeps(float(score), ties.of(place), is_sampled=bool(is_sampled[place]))
        for place, score in enumerate(table.scores)
    ]
    assert 0 < kept.sum() < 4_000


def share_violated(kind: str, name: str, tables: int) -> float:
    outcomes = [one_table(np.random.default_rng([2, i]), kind, 4_000, PROMISE)[name] for i in range(tables)]
    return sum(outcome.violated for outcome in outcomes) / tables


@pytest.mark.parametrize(
    ("kind", "mistake"), [("errors", "dropped"), ("equal rows", "content"), ("cliff", "first")]
)
def test_a_mistake_breaks_the_promise_and_the_rule_keeps_it(kind: str, mistake: str) -> None:
    assert share_violated(kind, mistake, 12) > 0.4
    assert share_violated(kind, "count", 12) < 0.2


def test_each_kind_can_be_simulated() -> None:
    for kind in KINDS:
        assert 0 <= one_table(np.random.default_rng(3), kind, 2_000, PROMISE)["count"].kept_share <= 1
    for kind in STREAMS:
        assert 0 <= one_stream(np.random.default_rng(3), kind, PROMISE)["ledger"].kept_share <= 1
