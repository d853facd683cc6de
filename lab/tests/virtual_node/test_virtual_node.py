"""Steps in virtual time: the same as in the simulator, and what the host costs."""

import numpy as np
import pytest

from lab.virtual_node.virtual_device import VirtualEvent
from lab.virtual_node.virtual_node import NodeStep, VirtualNode
from pipemax.domain.errors import PipeMaxError
from pipemax.domain.specs import Parallelism
from pipemax.sim.event_queue import EventQueue
from pipemax.sim.links import Links
from pipemax.sim.machine import Machine
from pipemax.sim.pipeline import Step
from pipemax.sim.result import Recording
from pipemax.sim.stage_times import StepWork
from tests.unit.sim.machines import small_model, small_node

DECODE = StepWork(decode_requests=32, decode_context_tokens=16_000)


def make_node(pipeline: int = 4, tensor: int = 1) -> VirtualNode:
    return VirtualNode(small_node(), small_model(), Parallelism(pipeline=pipeline, tensor=tensor))


def submit(node: VirtualNode, work: StepWork, host_works_since_s: float = 0.0) -> NodeStep:
    step = node.begin_step(work, host_works_since_s=host_works_since_s)
    for stage in range(node.num_stages):
        node.receive(step, stage)
        node.compute(step, stage)
    return step


@pytest.mark.parametrize(("pipeline", "tensor"), [(4, 1), (2, 2), (1, 4)])
def test_steps_end_when_they_do_in_the_simulator(pipeline: int, tensor: int) -> None:
    rng = np.random.default_rng(0)
    works = [  # without tokens, for which the simulator's systems wait, not its machine
        StepWork(prefill_tokens=int(rng.integers(1, 2000)), prefill_pairs=float(rng.integers(1, 10**6)))
        for _ in range(40)
    ]
    node = make_node(pipeline, tensor)
    steps = [submit(node, work) for work in works]
    ended_s = [node.run_to(step.done) for step in steps]

    queue, simulated_s = EventQueue(), list[float]()
    machine = Machine(
        queue,
        Links(queue, small_node()),
        small_node(),
        small_model(),
        Parallelism(pipeline=pipeline, tensor=tensor),
        Recording(),
    )

    def done(step: Step) -> None:
        simulated_s.append(queue.now_s())

    for work in works:
        machine.run(work, done)
    queue.run()
    assert ended_s == simulated_s


def test_stages_wait_for_the_tokens_of_the_step_that_came_as_many_steps_before_as_there_are_stages() -> None:
    node = make_node()
    steps = [submit(node, DECODE) for _ in range(5)]
    node.run_to(steps[4].done)
    first_done_s = steps[0].done.done_s
    assert first_done_s is not None
    assert steps[0].tokens_sent.done_s is not None
    assert steps[0].tokens_sent.done_s > first_done_s
    assert steps[3].arrivals[1].done_s < first_done_s  # type: ignore[operator]
    own_s = steps[4].stage_s[0]
    arrived_s = steps[4].arrivals[1].done_s
    assert arrived_s is not None
    assert arrived_s > steps[0].tokens_sent.done_s + own_s


def test_steps_without_tokens_count_among_those_that_stages_wait_for() -> None:
    node = make_node()
    first = submit(node, DECODE)
    for _ in range(3):
        node.pass_empty_step()
    second = submit(node, DECODE)  # the fourth after the first: it needs the first one's tokens
    node.run_to(second.done)
    assert first.tokens_sent.done_s is not None
    assert second.arrivals[1].done_s is not None
    assert second.arrivals[1].done_s > first.tokens_sent.done_s + second.stage_s[0]


def test_a_step_submitted_later_begins_later() -> None:
    alone, late = make_node(), make_node()
    alone_s = alone.run_to(submit(alone, DECODE).done)
    late.catch_up(2.5)
    assert late.run_to(submit(late, DECODE).done) == pytest.approx(2.5 + alone_s)


def test_the_first_stage_without_a_step_is_the_hosts_bubble_only_while_the_host_works() -> None:
    node = make_node()
    first_s = submit(node, DECODE).stage_s[0]
    node.catch_up(first_s + 1.0)
    submit(node, DECODE, host_works_since_s=first_s + 0.7)  # it waited for the node before
    assert node.usage.host_bubble_s == pytest.approx(0.3)
    submit(node, DECODE, host_works_since_s=0.0)  # behind a step that computes
    assert node.usage.host_bubble_s == pytest.approx(0.3)


def test_waiting_for_what_never_comes_fails() -> None:
    with pytest.raises(PipeMaxError, match="never happens"):
        make_node().run_to(VirtualEvent())


def test_a_layout_beyond_the_nodes_gpus_is_refused() -> None:
    with pytest.raises(ValueError, match="has 4 GPUs, not 8"):
        make_node(4, 2)
