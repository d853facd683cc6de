"""The input of a simulation, whatever the system: a node, a model and a workload."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pipemax.domain.specs import ModelSpec, NodeSpec
from pipemax.sim.event_queue import EventQueue
from pipemax.sim.links import Links
from pipemax.sim.machine import BLOCK_TOKENS
from pipemax.sim.measured_engine import MeasuredEngine
from pipemax.sim.result import Recording
from pipemax.sim.workloads import Workload, in_grains


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A node, a model and a workload, and what to record of the run."""

    node: NodeSpec
    model: ModelSpec
    workload: Workload
    grain: int = 1
    """Tokens of which the workload, and the model or the measured engine, have one (``workloads.in_grains``)."""
    measured: MeasuredEngine | None = None
    """Replaces the node's and the model's times and sizes; see ``measured_scenario``."""
    keep_spans: bool = False
    """Record every step on every stage, and every copy: for the Chrome trace."""
    decisions_path: Path | None = None
    """Where PipeMax's controller records its events and plans: what ``pipemax trace explain`` reads."""
    stops_at_drain: bool = False
    """End the run when STEADY_SHARE of the requests have finished; its figures are then those of that part. Only for
    the systems of ``measured_scenario``."""
    stops_below: float = 0.0
    """End the run once its rate is below so many tokens/s, from ``FIRST_LOOK`` of the rows on; 0: never. Only for the
    systems of ``measured_scenario``, and not for phases."""
    on_progress: Callable[[int], None] | None = field(default=None, compare=False)
    """Called now and then with the number of requests that have finished."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a KV block, which holds as many bytes whatever the grain; a measured engine has its own."""
        return BLOCK_TOKENS // self.grain

    def start(self) -> tuple[EventQueue, Links, Recording]:
        """Return a fresh queue, with the links and the recording of one run."""
        queue, recording = EventQueue(), Recording(keep_spans=self.keep_spans)
        on_span = recording.copy_spans.append if self.keep_spans else None
        return queue, Links(queue, self.node, on_span=on_span), recording

    def report(self, num_finished: int) -> None:
        if self.on_progress is not None:
            self.on_progress(num_finished)


def measured_scenario(
    engine: MeasuredEngine, workload: Workload, *, stops_at_drain: bool = False, grain: int = 1
) -> Scenario:
    """Return a scenario for the systems that run only on pipeline stages: PipeMax and stock vLLM."""
    return Scenario(
        node=engine.node(),
        model=engine.model(),
        workload=in_grains(workload, grain),
        grain=grain,
        measured=engine.in_grains(grain),
        stops_at_drain=stops_at_drain,
    )
