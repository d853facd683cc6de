"""Replicas that are started again with n-gram speculation, and without: no row is lost, and no death is a crash."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from pipemax.generation import Completion, GenerationRequest, Sampling
from pipemax.replicas.division import SPECULATION, Share, speculating
from pipemax.replicas.replica import RestartLimits
from pipemax.replicas.replica_set import ReplicaSet
from pipemax_spark.job.tune import variants
from tests.fakes.settings import fake_config
from tests.unit.replicas.test_replica_set import (
    FOR_EVER,
    assert_once_each,
    pid_of,
    poll_until,
    replica_set,
    requests,
)
from tests.waiting import wait_until

STRICT = RestartLimits(first_rest_s=FOR_EVER, max_fruitless=1)
"""A death that counts as a crash ends its replica."""
PROMPTS = [f"prompt {i}" for i in range(120)]


def seen(engine: ReplicaSet, name: str) -> list[Any]:
    return [own[name] for own in engine.stats().replicas]


def wait_for(engine: ReplicaSet, name: str, expected: list[Any]) -> list[Completion]:
    """Wait until all replicas are up and this figure of each is as expected; return the rows that have ended."""
    ended: list[Completion] = []

    def is_so() -> bool:
        ended.extend(engine.poll(0.01))
        return seen(engine, "state") == ["up"] * len(expected) and seen(engine, name) == expected

    wait_until(is_so)
    return ended


def test_pipemax_tune_tries_the_same_speculation() -> None:
    (tried,) = (variant for variant in variants({"model": "m"}) if "speculative_config" in variant.line)
    assert tried.engine["vllm"]["speculative_config"] == SPECULATION


def test_one_replica_is_started_again_with_it_and_its_rows_come_once(tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.touch()
    with replica_set(2, limits=STRICT, held_by=str(held), held_row_s=FOR_EVER) as engine:
        engine.submit(requests(PROMPTS))
        engine.speculate([2])
        ended = wait_for(engine, "speculates", [False, True])
        held.unlink()
        ended += poll_until(engine, len(PROMPTS) - len(ended))
        assert_once_each(ended, PROMPTS)
        assert seen(engine, "restarts") == [0, 1]
        engine.speculate([])
        wait_for(engine, "speculates", [False, False])
        assert seen(engine, "restarts") == [0, 2], "twice, and neither was a crash"


@pytest.mark.long  # six starts of fakes
def test_replicas_change_one_after_the_other() -> None:
    with replica_set(3, limits=STRICT) as engine:
        engine.speculate([1, 2, 3])
        fewest = 3

        def all_do() -> bool:
            nonlocal fewest
            engine.poll(0.01)
            fewest = min(fewest, seen(engine, "state").count("up"))
            return seen(engine, "speculates") == [True] * 3 and seen(engine, "state") == ["up"] * 3

        wait_until(all_do)
        assert fewest == 2


def test_a_replica_that_does_not_start_with_it_comes_back_without(caplog: pytest.LogCaptureFixture) -> None:
    with replica_set(2, limits=STRICT, speculating={"start_error": "no such method"}) as engine:
        engine.submit(requests(PROMPTS))
        engine.speculate([2])
        ended = wait_for(engine, "restarts", [0, 2])
        assert seen(engine, "speculates") == [False, False]
        ended += poll_until(engine, len(PROMPTS) - len(ended))
        assert_once_each(ended, PROMPTS)
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert warning.endswith("has ended with n-gram speculation, and starts again without: no such method")


@pytest.mark.long  # as one that does not start
def test_one_that_dies_with_it_comes_back_without_and_no_row_is_blamed(tmp_path: Path) -> None:
    held = tmp_path / "held"
    with replica_set(2, limits=STRICT, held_by=str(held), held_row_s=FOR_EVER) as engine:
        engine.speculate([1, 2])
        wait_for(engine, "speculates", [True, True])
        held.touch()
        engine.submit(requests(PROMPTS))
        for number, restarts in ((1, [2, 1]), (2, [2, 2])):
            os.kill(pid_of(engine, number), signal.SIGKILL)
            wait_for(engine, "restarts", restarts)
        held.unlink()
        assert_once_each(poll_until(engine, len(PROMPTS)), PROMPTS)
        assert seen(engine, "speculates") == [False, False]


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(Sampling(temperature=0.5, seed=7), id="sampled"),
        pytest.param(Sampling(choice=("a", "b"), logprobs=True), id="choices", marks=pytest.mark.long),
    ],
)
def test_a_row_that_it_may_change_waits_for_a_replica_without(sampling: Sampling, tmp_path: Path) -> None:
    with replica_set(2, limits=STRICT, speculating={"dies": "of any row"}) as engine:
        engine.speculate([1, 2])
        wait_for(engine, "speculates", [True, True])
        engine.submit([GenerationRequest(request_id="0", prompt="[[seed]]", sampling=sampling)])
        (row,) = poll_until(engine, 1)
        assert row.error is None
        wait_for(engine, "speculates", [False, False])
        engine.speculate([1])
        wait_for(engine, "speculates", [True, False])


def test_while_such_a_row_is_in_flight_no_replica_begins_to_speculate(tmp_path: Path) -> None:
    with replica_set(2, held_by=str(tmp_path), held_row_s=FOR_EVER) as engine:
        engine.submit(
            [GenerationRequest(request_id="0", prompt="one", sampling=Sampling(temperature=0.5, seed=7))]
        )
        engine.speculate([1, 2])
        for _ in range(5):
            engine.poll(0.01)
        assert seen(engine, "restarts") == [0, 0]
        with pytest.raises(ValueError, match=r"replicas \[3\]: the engine has 1 to 2"):
            engine.speculate([1, 3])


def test_the_config_of_a_replica_gets_one_argument_of_vllm() -> None:
    from pipemax.config import EngineConfig

    share = Share(config=EngineConfig.parse(fake_config(latency_s=1.0)), cores=(1,))
    changed = speculating(share)
    assert changed.config.vllm == {"fake": {"latency_s": 1.0}, "speculative_config": SPECULATION}
    assert (changed.cores, changed.config.model) == (share.cores, share.config.model)
