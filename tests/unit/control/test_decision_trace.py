"""Traces: what a controller did, replayed to the same plans and explained in words."""

from pathlib import Path
from random import Random

import pytest

from pipemax.control.decision_trace import TraceWriter, explain, replay
from pipemax.domain.request import PrefixId, SharedPrefix
from tests.golden.scenarios import TRACES
from tests.unit.control.fake_engine import FakeEngine, Faults, small_config, spec, stage


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with every kind of event in it."""
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    config = small_config(
        gpu_blocks=60,
        host_blocks=200,
        initial_output_tokens=5,
        stages=(stage(), stage(h2d_bytes_per_s=2e7)),
    )
    faults = Faults(refuse_run=0.01, refuse_prefetch=0.1, abort=0.005, preempt=0.005, cache_hit=0.05)
    prefix = SharedPrefix(prefix_id=PrefixId("instruction"), num_tokens=40)
    with TraceWriter(path, config) as writer:
        engine = FakeEngine(config=config, rng=Random(3), faults=faults, trace=writer)
        for index in range(40):
            shared = prefix if index % 3 == 0 else None
            engine.admit(spec(f"r{index}", 45 + 40 * (index % 5), 60, prefix=shared), 20 + index)
        engine.run()
    return path


def test_replay_gives_the_same_plans(trace: Path) -> None:
    pairs = list(replay(trace))
    assert len(pairs) > 100
    for recorded, now in pairs:
        assert recorded == now


def test_every_plan_is_explained_in_one_line(trace: Path) -> None:
    lines = list(explain(trace))
    steps = [line for line in lines if line.startswith("step ")]
    assert lines[0].startswith("4 batches over 2 stages; 60 GPU blocks")
    assert len(steps) == len(list(replay(trace)))
    assert "prefill, since the host pool is below its high watermark" in steps[0]
    text = "\n".join(lines)
    for words in ("runs D_", "prefetches", "of a budget of", "evicts", "StepCompleted", "parked"):
        assert words in text


def test_an_overflow_of_the_host_pool_is_reported() -> None:
    assert "the host pool overflows: recomputes" in "\n".join(explain(TRACES / "overflow.jsonl"))


@pytest.mark.parametrize("text", ['{"version": 0}\n', "hello\n", ""])
def test_another_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "else.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"else\.jsonl is no trace"):
        list(explain(path))
