"""The runs whose traces are kept: a fake engine, seeded, carries the controller's plans out.

``python -m tests.golden.scenarios`` writes ``tests/golden/traces`` again. Do so after a change of policy that is meant,
and look at the difference: ``pipemax trace explain FILE`` says in words what each step did, before and after.
"""

from collections.abc import Callable
from pathlib import Path
from random import Random

from pipemax.control.controller_config import ControllerConfig
from pipemax.control.decision_trace import TraceWriter
from pipemax.domain.events import InputEnded, InputOpened
from pipemax.domain.plan import Batching
from pipemax.domain.request import PrefixId, SharedPrefix
from tests.unit.control.fake_engine import FakeEngine, Faults, small_config, spec, stage

TRACES = Path(__file__).parent / "traces"

Fill = Callable[[FakeEngine], None]


def fill_mixed(engine: FakeEngine) -> None:
    """Lengths of every size: warm-up, steady phase, tail."""
    for index in range(20):
        prompt = 20 + 37 * (index * index % 13)
        engine.admit(spec(f"r{index}", prompt, 40), 8 + index * 7 % 17)


def fill_giant(engine: FakeEngine) -> None:
    """One request far longer than any step's budget."""
    engine.admit(spec("giant", 600, 30), 20)
    for index in range(16):
        engine.admit(spec(f"r{index}", 60, 40), 20)


def fill_templated(engine: FakeEngine) -> None:
    """One instruction before every prompt; input announced, and ended at once."""
    prefix = SharedPrefix(prefix_id=PrefixId("instruction"), num_tokens=70)
    engine.apply([InputOpened(), InputEnded()])
    for index in range(24):
        engine.admit(spec(f"r{index}", 80 + 9 * (index % 7), 30, prefix=prefix), 8 + index % 9)


def fill_overflow(engine: FakeEngine) -> None:
    """Outputs far beyond their forecast: the host pool overflows."""
    for index in range(7):
        engine.admit(spec(f"r{index}", 40, 50), 45)


def fill_one_at_a_time(engine: FakeEngine) -> None:
    """Pools that hold one request."""
    for index in range(3):
        engine.admit(spec(f"r{index}", 200, 10), 10)


SCENARIOS: dict[str, tuple[ControllerConfig, Faults, Fill]] = {
    "mixed": (small_config(gpu_blocks=60, host_blocks=150, steady_window=8), Faults(), fill_mixed),
    "giant": (
        small_config(gpu_blocks=60, num_batches=3, stages=(stage(h2d_bytes_per_s=8e6),)),
        Faults(),
        fill_giant,
    ),
    "templated": (small_config(gpu_blocks=40), Faults(), fill_templated),
    "overflow": (
        small_config(gpu_blocks=20, host_blocks=24, initial_output_tokens=1),
        Faults(),
        fill_overflow,
    ),
    "one_at_a_time": (small_config(gpu_blocks=14, host_blocks=14), Faults(), fill_one_at_a_time),
    "faults": (
        small_config(gpu_blocks=50, stages=(stage(), stage(h2d_bytes_per_s=2e7))),
        Faults(refuse_run=0.01, refuse_prefetch=0.1, abort=0.005, preempt=0.005),
        fill_mixed,
    ),
    "mixed_batching": (
        small_config(
            gpu_blocks=60,
            host_blocks=200,
            batching=Batching.MIXED,
            mixed_step_tokens=48,
            mixed_live_watermark=2.0,
        ),
        Faults(refuse_run=0.01, refuse_prefetch=0.1),
        fill_mixed,
    ),
}


def record(name: str, path: Path) -> None:
    config, faults, fill = SCENARIOS[name]
    with TraceWriter(path, config) as writer:
        engine = FakeEngine(config=config, rng=Random(0), faults=faults, trace=writer)
        fill(engine)
        engine.run()


if __name__ == "__main__":
    TRACES.mkdir(exist_ok=True)
    for scenario in SCENARIOS:
        record(scenario, TRACES / f"{scenario}.jsonl")
