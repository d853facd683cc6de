"""Replicas as processes around the fake engine: every row comes back once, whatever dies."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipemax.config import EngineConfig
from pipemax.domain.errors import EngineDiedError, EngineStartError
from pipemax.domain.step_records import StepLimits
from pipemax.generation import Completion, GenerationRequest
from pipemax.node.process import ProcessIdentity
from pipemax.replicas.hardware import Gpu, Hardware
from pipemax.replicas.replica import RestartLimits
from pipemax.replicas.replica_set import ReplicaSet
from tests.fakes.replica_child import COMMAND
from tests.fakes.settings import expected_text, fake_config
from tests.waiting import wait_until

PARENT = """
import time
from tests.unit.replicas.test_replica_set import replica_set

with replica_set(2) as engine:
    print(*(own["pid"] for own in engine.stats().replicas), flush=True)
    time.sleep(60)
"""
"""A process with replicas."""

QUICK = RestartLimits(first_rest_s=0.01)


@contextmanager
def replica_set(
    replicas: int = 2, *, limits: RestartLimits = QUICK, policy: str = "vllm", **fake: object
) -> Iterator[ReplicaSet]:
    values = {**fake_config(**fake), "replicas": replicas, "policy": policy}
    hardware = Hardware(cores_of_nodes={0: tuple(sorted(os.sched_getaffinity(0)))})
    engine = ReplicaSet(EngineConfig.parse(values), hardware=hardware, command=COMMAND, limits=limits)
    pids = [figures["pid"] for figures in engine.stats().replicas]
    try:
        yield engine
        pids += [figures["pid"] for figures in engine.stats().replicas]
    finally:
        engine.close()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()], "a replica outlived the set"


def requests(prompts: Sequence[str]) -> list[GenerationRequest]:
    return [GenerationRequest(request_id=str(i), prompt=prompt) for i, prompt in enumerate(prompts)]


def poll_until(engine: ReplicaSet, count: int, timeout_s: float = 60.0) -> list[Completion]:
    ended: list[Completion] = []
    deadline_s = time.monotonic() + timeout_s
    while len(ended) < count:
        assert time.monotonic() < deadline_s, f"{len(ended)} of {count} rows have ended"
        ended += engine.poll(0.05)
    return ended


def assert_once_each(completions: Sequence[Completion], prompts: Sequence[str]) -> None:
    texts = {completion.request_id: completion.text for completion in completions}
    assert len(texts) == len(completions) == len(prompts)
    assert texts == {str(i): expected_text(prompt) for i, prompt in enumerate(prompts)}


def pid_of(engine: ReplicaSet, number: int) -> int:
    pid = engine.stats().replicas[number - 1]["pid"]
    assert isinstance(pid, int)
    return pid


def test_replicas_start_together_if_the_first_has_nothing_to_measure(tmp_path: Path) -> None:
    with replica_set(2, policy="auto", starts_together=[str(tmp_path), 2]) as engine:
        assert {own["state"] for own in engine.stats().replicas} == {"up"}


def test_a_replica_that_measures_starts_before_the_others(tmp_path: Path) -> None:
    with (
        pytest.raises(EngineStartError, match="replica 1: it is the only one of 2 engines that starts"),
        replica_set(2, policy="auto", measures=True, starts_together=[str(tmp_path), 2], together_s=0.5),
    ):
        pass


def test_rows_are_shared_and_come_back_once_each() -> None:
    prompts = [f"prompt {i}" for i in range(200)]
    with replica_set(2) as engine:
        engine.submit(requests(prompts))
        assert_once_each(poll_until(engine, 200), prompts)
        assert engine.poll(0.1) == []
        figures = engine.stats().replicas
        assert [own["rows_done"] for own in figures] == [100, 100]
        assert [own["restarts"] for own in figures] == [0, 0]
        assert engine.policy_choice.reason == "in each of 2 replicas: a fake has no scheduler"


@pytest.mark.long  # tests/unit/replicas/test_routing shows where rows go
def test_rows_with_a_common_beginning_go_to_one_replica() -> None:
    documents = [letter * 3_000 for letter in "abcd"]
    prompts = [f"{documents[i % 4]} question {i // 4}" for i in range(16)]
    with replica_set(2, prefix_memory=64) as engine:
        engine.submit(requests(prompts))
        poll_until(engine, 16)
        done = [own["rows_done"] for own in engine.stats().replicas]
        assert done == [8, 8]
        wait_until(
            lambda: engine.poll(0.05) == [] and "prefix_cache_hit_rate" in engine.stats().metrics, what=""
        )
        # Of each document's four rows the first finds nothing: 1 of 3 words is the document, 1 more "question".
        assert engine.stats().metrics["prefix_cache_hit_rate"] == pytest.approx(2 / 3 * 6 / 8, abs=0.01)


FOR_EVER = 3_600.0


def test_one_that_is_killed_in_mid_work_loses_and_doubles_nothing_and_the_other_goes_on(
    tmp_path: Path,
) -> None:
    prompts, held = [f"prompt {i}" for i in range(300)], tmp_path / "held"
    limits = RestartLimits(first_rest_s=FOR_EVER)
    with replica_set(2, limits=limits, held_by=str(held), held_row_s=FOR_EVER) as engine:
        rows = requests(prompts)
        engine.submit(rows[:40])
        ended = poll_until(engine, 40)
        held.touch()  # rows wait while it exists
        engine.submit(rows[40:])
        wait_until(
            lambda: (
                not engine.poll(0.01) and all(own["running_requests"] > 20 for own in engine.stats().replicas)
            )
        )
        os.kill(pid_of(engine, 1), signal.SIGKILL)
        wait_until(lambda: not engine.poll(0.01) and engine.stats().replicas[0]["state"] != "up")
        survivor_done = engine.stats().replicas[1]["rows_done"]
        held.unlink()
        ended += poll_until(engine, 300 - len(ended))
        assert_once_each(ended, prompts)
        assert engine.stats().replicas[1]["rows_done"] == survivor_done + 260
        wait_until(lambda: not engine.poll(0.01) and engine.stats().replicas[0]["state"] == "resting")


def test_a_row_that_kills_two_replicas_ends_the_engine_and_the_rest_has_come_before() -> None:
    with replica_set(2) as engine:
        engine.submit(requests(["one", "two", "[[crash]]"]))
        with pytest.raises(
            EngineDiedError, match="rows that were in another replica as that died, too"
        ) as died:
            poll_until(engine, 4)
        assert died.value.suspects is not None
        assert "2" in died.value.suspects
        with pytest.raises(EngineDiedError):
            engine.poll(0.0)
        with pytest.raises(EngineDiedError):
            engine.submit(requests(["one more"]))


@pytest.mark.long  # the engine dies with its last replica, below
def test_a_replica_that_always_dies_is_given_up_and_the_others_do_all() -> None:
    with replica_set(2, limits=RestartLimits(first_rest_s=0.01, max_fruitless=2), latency_s=0.05) as engine:
        for _ in range(2):
            wait_until(
                lambda: not engine.poll(0.01) and engine.stats().replicas[0]["state"] == "up", what="up"
            )
            os.kill(pid_of(engine, 1), signal.SIGKILL)
            wait_until(
                lambda: not engine.poll(0.01) and engine.stats().replicas[0]["state"] != "up", what="down"
            )
        assert engine.stats().replicas[0]["state"] == "given up"
        prompts = [f"prompt {i}" for i in range(50)]
        engine.submit(requests(prompts))
        assert_once_each(poll_until(engine, 50), prompts)
        assert engine.stats().replicas[1]["rows_done"] == 50


def run_by_limits(engine: ReplicaSet, expected: Sequence[tuple[int, int]]) -> bool:
    """Wait until each replica's latest step was made by these limits; records of before are not counted."""
    engine.take_step_records()
    seen: dict[int, tuple[int, int]] = {}

    def all_do() -> bool:
        engine.poll(0.01)
        for place, own in enumerate(engine.take_step_records()):
            if len(own):
                seen[place] = int(own.prompt_tokens[-1]), int(own.running[-1])
        return seen == dict(enumerate(expected))

    wait_until(all_do)
    return True


def test_each_replica_has_limits_of_its_own_also_after_it_was_replaced() -> None:
    with replica_set(2, most_limits=[8192, 64]) as engine:
        assert engine.most_limits() == [StepLimits(step_tokens=8192, running_rows=64)] * 2
        engine.set_limits(
            [StepLimits(step_tokens=2048, running_rows=64), StepLimits(step_tokens=8192, running_rows=16)]
        )
        assert run_by_limits(engine, [(2048, 64), (8192, 16)])
        os.kill(pid_of(engine, 1), signal.SIGKILL)
        wait_until(lambda: not engine.poll(0.01) and engine.stats().replicas[0]["restarts"] == 1)
        wait_until(lambda: not engine.poll(0.01) and engine.stats().replicas[0]["state"] == "up")
        assert run_by_limits(engine, [(2048, 64), (8192, 16)])
        with pytest.raises(ValueError, match="1 limits were given, and the engine has 2 replicas"):
            engine.set_limits([StepLimits(step_tokens=1, running_rows=1)])
        with pytest.raises(
            ValueError, match=r"replica 2: .*running_rows=65.* is above what it was started for"
        ):
            engine.set_limits(
                [StepLimits(step_tokens=1, running_rows=1), StepLimits(step_tokens=1, running_rows=65)]
            )


def test_replicas_whose_limits_are_fixed_say_so() -> None:
    with replica_set(2) as engine:
        assert engine.most_limits() == engine.take_step_records() == []
        with pytest.raises(ValueError, match="they cannot change"):
            engine.set_limits([StepLimits(step_tokens=1, running_rows=1)] * 2)


def test_the_engine_dies_with_its_last_replica() -> None:
    with replica_set(2, limits=RestartLimits(max_fruitless=1)) as engine:
        for number in (1, 2):
            os.kill(pid_of(engine, number), signal.SIGKILL)
        with pytest.raises(EngineDiedError, match=r"no replica is left .*SIGKILL"):
            poll_until(engine, 1)


@pytest.mark.long  # as one that is killed
def test_a_replica_that_hangs_is_killed_and_its_rows_run_elsewhere(tmp_path: Path) -> None:
    with replica_set(2, limits=RestartLimits(first_rest_s=0.01, silence_s=2.0)) as engine:
        engine.submit(requests([f"[[hang-once {tmp_path}/hung]] one", "two", "three"]))
        assert len(poll_until(engine, 3)) == 3
        away = ("ending", "resting")  # dead, and not yet started again
        assert sum(own["restarts"] + (own["state"] in away) for own in engine.stats().replicas) == 1


def test_aborted_rows_do_not_come_back_wherever_they_are(tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.touch()
    with replica_set(2, held_by=str(held), held_row_s=FOR_EVER) as engine:
        engine.submit(requests([f"prompt {i}" for i in range(20)]))
        engine.abort([str(i) for i in range(10)] + ["unknown"])
        again = GenerationRequest(request_id="3", prompt="again")
        engine.submit([again])
        held.unlink()
        ended = poll_until(engine, 11)
        assert engine.poll(0.1) == []
        assert sorted(int(c.request_id) for c in ended) == [3, *range(10, 20)]
        assert next(c.text for c in ended if c.request_id == "3") == expected_text("again")


def test_credit_is_that_of_all_and_counts_rows_before_a_replica_has_heard_of_them() -> None:
    with replica_set(2, admission_credit_tokens=1_000, latency_s=5.0) as engine:
        wait_until(
            lambda: engine.poll(0.01) == [] and engine.admission_credit_tokens() == 2_000, what="reports"
        )
        engine.submit(requests(["a b c d"]))
        assert 2_000 - 256 < engine.admission_credit_tokens() <= 2_000 - 64, (
            "a quarter of max_tokens at first"
        )
        os.kill(pid_of(engine, 2), signal.SIGKILL)
        wait_until(lambda: engine.poll(0.01) == [] and engine.admission_credit_tokens() <= 1_000, what="one")


def test_more_replicas_than_gpus_are_told() -> None:
    only_gpu = Gpu(uuid="GPU-0", pci_address="0000:01:00.0", numa_node=None)
    hardware = Hardware(gpus=(only_gpu,), cores_of_nodes={0: (0,)})
    config = EngineConfig.parse({"model": "any", "replicas": 2})
    with pytest.raises(EngineStartError, match="replicas 2 need a GPU each, and this executor has 1"):
        ReplicaSet(config, hardware=hardware, command=COMMAND)


@pytest.mark.long  # tests/serve/test_replicas_served ends them
def test_each_replica_runs_on_cores_of_its_own_and_ends_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        children = [ProcessIdentity.of(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(children) == 2
        if len(os.sched_getaffinity(0)) >= 2:
            affinities = [os.sched_getaffinity(child.pid) for child in children]
            assert not affinities[0] & affinities[1]
            assert len(affinities[0]) == len(affinities[1])
        parent.kill()
    wait_until(lambda: not any(child.is_running() for child in children), what="the replicas have ended")
