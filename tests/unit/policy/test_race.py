"""The fastest of several simulations is found without running all to their end."""

from dataclasses import dataclass, field

from pipemax.policy.race import Round, race

ROUNDS = (Round(share=0.2, at_least=0.8, most=3), Round(share=0.5, at_least=0.95, most=2))


@dataclass
class Scripted:
    """A simulation that makes these tokens/s until a share of the rows have finished."""

    early: float
    later: float
    shares: list[float] = field(default_factory=list)

    def advance(self, share: float) -> float:
        self.shares.append(share)
        return self.early if share < 0.5 else self.later


def test_those_far_behind_are_given_up_early_and_the_others_go_on() -> None:
    runs = {"slow": Scripted(70, 999), "good": Scripted(90, 100), "best": Scripted(100, 99)}
    assert race(runs, ROUNDS) == ["good", "best"]
    assert runs["slow"].shares == [0.2], "not simulated any further"
    assert runs["good"].shares == [0.2, 0.5]


def test_no_more_go_on_than_a_round_allows() -> None:
    runs = {rate: Scripted(rate, rate) for rate in (97, 98, 99, 100)}
    assert race(runs, ROUNDS) == [100, 99]
    assert runs[97].shares == [0.2]


def test_the_race_ends_once_one_is_left() -> None:
    runs = {"best": Scripted(100, 100), "slow": Scripted(10, 10)}
    assert race(runs, ROUNDS) == ["best"]
    assert runs["best"].shares == [0.2]


def test_the_only_candidate_is_not_simulated() -> None:
    only = Scripted(1, 1)
    assert race({"only": only}, ROUNDS) == ["only"]
    assert only.shares == []
