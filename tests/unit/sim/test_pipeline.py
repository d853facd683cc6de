"""Steps in parts: one after another, each held back by itself, and what they waited."""

import pytest

from pipemax.sim.event_queue import EventQueue, Priority
from pipemax.sim.pipeline import Pipeline, StageSpan, Step, StepKind


def step(seconds: float, num_parts: int) -> Step:
    return Step(
        kind=StepKind.DECODE,
        stage_s=[seconds, seconds],
        activation_bytes=0.0,
        on_done=lambda step: None,
        batch=1,
        tokens=1,
        num_parts=num_parts,
    )


def test_a_stage_computes_a_step_s_parts_in_turn_and_passes_it_on_after_the_last() -> None:
    queue, spans, ended = EventQueue(), list[StageSpan](), list[tuple[int, int, float]]()
    pipeline = Pipeline(
        queue,
        2,
        send=lambda stage, num_bytes: 1.0,
        on_part_end=lambda stage, step, part: ended.append((stage, part, queue.now_s())),
        on_span=spans.append,
    )
    pipeline.submit(step(4.0, 4))
    queue.run()
    assert ended == [(0, part, part + 1.0) for part in range(4)] + [
        (1, part, part + 6.0) for part in range(4)
    ]
    assert [(span.stage, span.start_s, span.end_s) for span in spans] == [
        (stage, end_s - 1.0, end_s) for stage, _, end_s in ended
    ]


def test_a_part_that_is_held_back_stalls_the_stage_and_what_comes_behind() -> None:
    queue, stalls, ended = EventQueue(), list[float](), list[float]()
    opens_s = 5.0

    def gate(stage: int, step: Step, part: int) -> bool:
        return (stage, step.number, part) != (0, 0, 1) or queue.now_s() >= opens_s

    pipeline = Pipeline(
        queue,
        2,
        send=lambda stage, num_bytes: 0.0,
        gate=gate,
        on_part_end=lambda stage, step, part: ended.append(queue.now_s()) if stage == 0 else None,
        on_stall=stalls.append,
    )
    pipeline.submit(step(4.0, 2))
    pipeline.submit(step(4.0, 2))
    queue.at(3.0, Priority.COPY_DONE, lambda: pipeline.poke(0))  # still held
    queue.at(opens_s, Priority.COPY_DONE, lambda: pipeline.poke(0))
    queue.run()
    assert ended == [2.0, 7.0, 9.0, 11.0]
    assert stalls == [pytest.approx(3.0)]
