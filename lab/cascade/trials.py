"""Run the cascade's own decisions over one simulated table, and next to them mistakes that somebody will make."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from lab.cascade.tables import LARGE_ERROR_SCORE, Table, make_night, make_table
from pipemax_spark.cascade.certificate import certify
from pipemax_spark.cascade.coins import coin, tie_break
from pipemax_spark.cascade.draw import Draw
from pipemax_spark.cascade.ledger import Ledger
from pipemax_spark.cascade.ordered_rows import Cut, Kept, LabelledRow, cut_at
from pipemax_spark.cascade.pilot import PILOT_ROWS, choose_sample_share, forecast
from pipemax_spark.cascade.promise import Promise

NIGHTS, NIGHT_ROWS, NIGHT_SAMPLE_SHARE = 40, 1_000, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one table, or of one stream."""

    violated: bool
    """Whether more rows were missed than is promised; of the forecast, whether it was wrong."""
    kept_share: float
    """Of the rows; of the forecast, its width."""


Outcomes = Mapping[str, Outcome]


def seed_of(rng: np.random.Generator) -> str:
    """Return a seed as ``new_seed`` draws it, the same in each run of the simulation."""
    return rng.bytes(16).hex()


def make_draw(promise: Promise, rows: int, seed: str) -> Draw:
    return Draw(
        seed=seed,
        rows=rows,
        agree=promise.agree,
        confidence=promise.confidence,
        sample_share=promise.default_sample_share(rows),
        spec_hash="simulated",
        manifest_digest="simulated",
    )


def coins_of(seed: str, requests: np.ndarray) -> np.ndarray:
    """Return the rows' coins; copies of a request are numbered in the table's order."""
    if len(np.unique(requests)) == len(requests):
        return np.array([coin(seed, str(request), 1) for request in requests.tolist()])
    numbers: dict[int, int] = {}
    coins = np.empty(len(requests))
    for place, request in enumerate(requests.tolist()):
        numbers[request] = number = numbers.get(request, 0) + 1
        coins[place] = coin(seed, str(request), number)
    return coins


class Ties:
    """The tie breaks of a table's requests, of which few are needed."""

    def __init__(self, table: Table, seed: str) -> None:
        self._requests, self._seed = table.requests, seed
        self._known: dict[int, float] = {}

    def of(self, place: int) -> float:
        request = int(self._requests[place])
        if request not in self._known:
            self._known[request] = tie_break(self._seed, str(request))
        return self._known[request]


def labelled(table: Table, chosen: np.ndarray, ties: Ties) -> list[LabelledRow]:
    """Return the chosen rows as both models have answered them."""
    places = np.flatnonzero(chosen)
    scores, differs = table.scores[places].tolist(), table.differs[places].tolist()
    return [
        LabelledRow(score, ties.of(place), bit)
        for place, score, bit in zip(places.tolist(), scores, differs, strict=True)
    ]


def passed(table: Table, cut: Cut, ties: Ties) -> np.ndarray:
    """Return which rows keep the small answer if they are not sampled, as ``Cut.keeps`` says of each."""
    if cut.kept is Kept.NONE:
        return np.zeros(len(table.scores), bool)
    if cut.threshold is None:
        return np.isfinite(table.scores)
    score, tie = cut.threshold
    above = table.scores > score
    for place in np.flatnonzero(table.scores == score).tolist():
        above[place] = ties.of(place) > tie
    return above


def one_table(rng: np.random.Generator, kind: str, rows: int, promise: Promise) -> Outcomes:
    """Return what came of a table: by the rule, by its bound, with a pilot, and by each mistake."""
    rows = min(rows, 2_000) if kind.startswith("small") else rows
    table = make_table(kind, rng, rows, promise)
    draw = make_draw(promise, rows, seed_of(rng))
    coins, ties = coins_of(draw.seed, table.requests), Ties(table, draw.seed)
    is_sampled = coins < draw.sample_share
    certificate = certify(draw, labelled(table, is_sampled, ties))
    kept = passed(table, certificate.cut, ties) & ~is_sampled
    outcomes = {
        "count": _outcome(table, kept, certificate.budget_rows),
        "bound": _outcome(table, kept, certificate.max_misses),
    }
    return outcomes | _with_pilot(table, draw, coins, ties) | _mistakes(rng, table, draw, is_sampled, ties)


def _outcome(table: Table, kept: np.ndarray, most_misses: int) -> Outcome:
    misses = int((table.differs & kept).sum())
    return Outcome(violated=misses > most_misses, kept_share=float(kept.mean()))


def _with_pilot(table: Table, draw: Draw, coins: np.ndarray, ties: Ties) -> Outcomes:
    """Let a pilot choose the sample share, and hold what it forecast against what came."""
    first = replace(draw, pilot_share=PILOT_ROWS / draw.rows)
    in_pilot = coins < first.pilot_share
    pilot = labelled(table, in_pilot, ties)
    chosen = first.after_pilot(choose_sample_share(first, pilot))
    outcomes = {}
    for name, after in (("pilot", chosen), ("forecast", first)):
        is_sampled = (coins >= after.pilot_share) & (coins < after.sampled_below)
        certificate = certify(after, labelled(table, is_sampled, ties))
        kept = passed(table, certificate.cut, ties) & ~is_sampled & ~in_pilot
        outcomes[name] = _outcome(table, kept, certificate.budget_rows)
    expected, share = forecast(first, pilot), outcomes["forecast"].kept_share
    wrong = not expected.low - 0.02 <= share <= expected.high + 0.02
    return outcomes | {"forecast": Outcome(violated=wrong, kept_share=expected.high - expected.low)}


def _mistakes(
    rng: np.random.Generator, table: Table, draw: Draw, is_sampled: np.ndarray, ties: Ties
) -> Outcomes:
    rows, share, budget = draw.rows, draw.sample_share, draw.promise.budget(draw.rows)
    allowed = draw.promise.allowed_differing(rows, share)

    def kept_by(chosen: np.ndarray, labels: np.ndarray, allowed_rows: int | None) -> np.ndarray:
        cut = cut_at(labelled(table, labels, ties), allowed_rows)
        return passed(table, cut, ties) & ~chosen

    draws = [is_sampled, *(rng.random(rows) < share for _ in range(4))]
    early = (np.arange(rows) < rows // 10) & (rng.random(rows) < 10 * share)
    same = (rng.random(rows) < share)[table.requests]
    no_errors = is_sampled & (table.scores != LARGE_ERROR_SCORE)
    kept = {
        "plug-in": kept_by(is_sampled, is_sampled, int(share * budget)),
        "score": _believed(table, budget),
        "redrawn": max((kept_by(each, each, allowed) for each in draws), key=np.sum),
        "first": kept_by(early, early, allowed),
        "dropped": kept_by(is_sampled, no_errors, allowed),
        "content": kept_by(same, same, allowed),
    }
    return {name: _outcome(table, mask, budget) for name, mask in kept.items()}


def _believed(table: Table, budget: int) -> np.ndarray:
    """Keep as many of the surest rows as may be kept if the scores are probabilities; no row is sampled."""
    order = np.argsort(-table.scores, kind="stable")  # NaN comes last
    expected = np.cumsum(1 - np.nan_to_num(table.scores[order], nan=-np.inf))
    kept = np.zeros(len(order), bool)
    kept[order[: np.searchsorted(expected, budget, side="right")]] = True
    return kept


def one_stream(rng: np.random.Generator, kind: str, promise: Promise) -> Outcomes:
    """Return what came of nights of new rows: by the ledger, its bound, a first threshold for ever, and one seed."""
    ledger = other = Ledger(
        agree=promise.agree,
        confidence=promise.confidence,
        sample_share=NIGHT_SAMPLE_SHARE,
        prior_rows=promise.budget(NIGHTS * NIGHT_ROWS) / 16,
        spec_hash="simulated",
    )
    tallies = {name: _Tally() for name in ("ledger", "bound", "frozen", "one seed")}
    first_seed, first_threshold = seed_of(rng), np.inf
    for night in range(NIGHTS):
        table = make_night(kind, rng, NIGHT_ROWS, night, NIGHTS)
        if kind == "adversary":
            table = _chosen_by_adversary(table, ledger)
        ledger, cut, kept = _close_night(ledger, table, seed_of(rng))
        other, _, kept_by_other = _close_night(other, table, first_seed)
        if first_threshold == np.inf and cut.threshold is not None:
            first_threshold = cut.threshold[0]
        budget = promise.budget(ledger.seen_rows)
        tallies["ledger"].add(table, kept, budget)
        tallies["bound"].add(table, kept, ledger.max_misses)
        tallies["frozen"].add(table, table.scores > first_threshold, budget)
        tallies["one seed"].add(table, kept_by_other, budget)
    return {name: tally.outcome() for name, tally in tallies.items()}


def _close_night(ledger: Ledger, table: Table, seed: str) -> tuple[Ledger, Cut, np.ndarray]:
    rows = len(table.scores)
    draw = replace(ledger.draw(rows, "simulated"), seed=seed)
    is_audited = coins_of(seed, table.requests) < draw.sample_share
    ties = Ties(table, seed)
    after, cut = ledger.close_batch(draw, labelled(table, is_audited, ties))
    return after, cut, passed(table, cut, ties) & ~is_audited


def _chosen_by_adversary(table: Table, ledger: Ledger) -> Table:
    """Return tonight's rows as somebody makes them who sees the ledger and the scores, and not tonight's coins."""
    allowed = ledger.allowed_differing(ledger.seen_rows + len(table.scores))
    left = -1 if allowed is None else allowed - ledger.differing_rows
    if left <= 2:
        return table
    differs = table.differs.copy()
    differs[np.argsort(-table.scores)[: int(2 * left / ledger.sample_share)]] = True
    return replace(table, differs=differs)


class _Tally:
    """Misses and kept rows of all nights so far."""

    def __init__(self) -> None:
        self._misses = self._kept = self._rows = 0
        self._violated = False

    def add(self, table: Table, kept: np.ndarray, most_misses: int) -> None:
        self._misses += int((table.differs & kept).sum())
        self._kept += int(kept.sum())
        self._rows += len(kept)
        self._violated |= self._misses > most_misses

    def outcome(self) -> Outcome:
        return Outcome(violated=self._violated, kept_share=self._kept / self._rows)
