"""A node in virtual time: stages in a row, as long as the simulator's machine model says each step takes there.

The caller submits steps and copies at the present moment, which it moves on by ``catch_up`` and ``run_to``. Steps run
first in, first out on every stage; activations reach the next stage one after the other.

As with vLLM's V2 runner, the tokens that a step samples on the last stage are taken in by the others when they begin
the step that comes as many steps later as there are stages, and they wait for them then.
"""

from collections import deque
from dataclasses import dataclass, field

from lab.virtual_node.kv_order import StageKv, StepKv
from lab.virtual_node.virtual_device import VirtualDevice, VirtualEvent
from pipemax.domain.errors import PipeMaxError
from pipemax.domain.specs import KvCapacity, ModelSpec, NodeSpec, Parallelism, block_layers, kv_capacity
from pipemax.sim.event_queue import EventQueue, Priority
from pipemax.sim.links import Direction, Links
from pipemax.sim.machine import BLOCK_TOKENS
from pipemax.sim.stage_times import StageTimes, StepWork
from pipemax.transfer.layout import BlockLayout, compact_layout

_TOKEN_BYTES = 4


@dataclass(slots=True, kw_only=True, eq=False)
class NodeStep:
    """One step on its way through the stages."""

    stage_s: list[float]
    """Seconds on each stage."""
    kv: StepKv | None
    activation_bytes: float
    arrivals: list[VirtualEvent]
    """When its activations are at each stage; the first needs none."""
    tokens_before: VirtualEvent | None
    """When the tokens that it must take in first are at the other stages."""
    num_outputs: int
    tokens_sent: VirtualEvent = field(default_factory=VirtualEvent)
    """When the tokens that it samples are at the other stages."""
    done: VirtualEvent = field(default_factory=VirtualEvent)
    """When the last stage has ended it."""


@dataclass(slots=True, kw_only=True)
class NodeUsage:
    """What the stages have done so far."""

    num_steps: int = 0
    stage_s: float = 0.0
    """Seconds of computing, summed over the stages, of all steps submitted."""
    prompt_stage_s: float = 0.0
    """The part of ``stage_s`` in steps of prompt tokens only."""
    decode_stage_s: float = 0.0
    """The part of ``stage_s`` in steps that only decode."""
    mixed_stage_s: float = 0.0
    """The part of ``stage_s`` in steps that do both."""
    num_decode_steps: int = 0
    """Steps that decode any request."""
    num_decoded: int = 0
    """Decoded requests, summed over the steps."""
    host_bubble_s: float = 0.0
    """Seconds in which the first stage had no step while the host worked."""

    def count_step(self, work: StepWork, stage_s: float) -> None:
        """Count a step that takes ``stage_s`` seconds, summed over the stages."""
        self.num_steps += 1
        self.stage_s += stage_s
        if work.decode_requests == 0:
            self.prompt_stage_s += stage_s
            return
        self.num_decode_steps += 1
        self.num_decoded += work.decode_requests
        if work.prefill_tokens == 0:
            self.decode_stage_s += stage_s
        else:
            self.mixed_stage_s += stage_s


class VirtualNode:
    """The stages and their links. Not thread-safe."""

    def __init__(
        self,
        node: NodeSpec,
        model: ModelSpec,
        parallelism: Parallelism,
        *,
        frees_windows: bool = False,
        checks_kv: bool = True,
    ) -> None:
        """Set up idle stages. ``ValueError`` if the model does not fit, or the node has too few GPUs.

        ``frees_windows``: layers with windows have KV blocks of their own.
        ``checks_kv``: whether steps and copies are checked to find the KV that they should.
        """
        num_gpus = parallelism.pipeline * parallelism.tensor
        if num_gpus > node.num_gpus:
            raise ValueError(f"{node.name} has {node.num_gpus} GPUs, not {num_gpus}")
        self.capacity: KvCapacity = kv_capacity(
            node, model, parallelism, block_tokens=BLOCK_TOKENS, frees_windows=frees_windows
        )
        self.usage = NodeUsage()
        self._num_gpus = num_gpus
        self.times = StageTimes(node, model, parallelism)
        room_layers = block_layers(model, parallelism, frees_windows=frees_windows)
        self.layouts = tuple(_layout(model, layers, parallelism) for layers in room_layers)
        """Each stage's KV blocks, as one of its GPUs has them."""
        self._queue = EventQueue()
        self._link = node.link
        self._links = links = Links(self._queue, node)
        tensor = parallelism.tensor
        self.devices = tuple(
            VirtualDevice(
                self._queue,
                links,
                gpus=range(stage * tensor, (stage + 1) * tensor),
                block_bytes=layout.block_bytes,
                kv=self._stage_kv(stage) if checks_kv else None,
            )
            for stage, layout in enumerate(self.layouts)
        )
        self._last_arrival_s = [0.0] * parallelism.pipeline
        self._tokens_sent: deque[VirtualEvent | None] = deque([None] * parallelism.pipeline)
        self._last_step: NodeStep | None = None
        self._first_stage_free_s: float | None = None  # None while it has steps, and before the first

    def _stage_kv(self, stage: int) -> StageKv:
        capacity = self.capacity
        return StageKv(
            stage,
            gpu_blocks=capacity.gpu_blocks,
            host_blocks=capacity.host_blocks,
            block_tokens=capacity.block_tokens,
        )

    @property
    def num_stages(self) -> int:
        return len(self.devices)

    @property
    def now_s(self) -> float:
        return self._queue.now_s()

    @property
    def host_to_gpu_s(self) -> float:
        """Seconds in which a GPU's link carried KV from the host, mean over the GPUs."""
        return self._links.busy_s(Direction.HOST_TO_GPU) / self._num_gpus

    def catch_up(self, now_s: float) -> None:
        """Let happen what happens up to ``now_s``."""
        self._queue.run_until(now_s)

    def run_to(self, event: VirtualEvent) -> float:
        """Let happen all that comes up to an event; return its time. ``PipeMaxError`` if it never comes."""
        while event.done_s is None:
            if len(self._queue) == 0:
                raise PipeMaxError("the virtual node waits for what never happens")
            self._queue.run_next()
        return event.done_s

    def begin_step(
        self, work: StepWork, kv: StepKv | None = None, *, host_works_since_s: float = 0.0
    ) -> NodeStep:
        """Begin a step; its stages are then submitted by ``receive`` and ``compute``, first to last.

        ``kv``: what it reads and writes, if that is to be checked. ``host_works_since_s``: since when the host has not
        waited for the node.
        """
        stage_s = self.times.stage_s(work)
        step = NodeStep(
            stage_s=stage_s,
            kv=kv,
            activation_bytes=self.times.activation_bytes(work.tokens),
            arrivals=[VirtualEvent() for _ in stage_s],
            tokens_before=self._tokens_sent.popleft(),
            num_outputs=work.outputs,
        )
        self._tokens_sent.append(step.tokens_sent if work.outputs else None)
        self.usage.count_step(work, sum(stage_s))
        if self._first_stage_free_s is not None:
            idle_since_s = max(self._first_stage_free_s, host_works_since_s)
            self.usage.host_bubble_s += max(0.0, self.now_s - idle_since_s)
            self._first_stage_free_s = None
        self._last_step = step
        return step

    def pass_empty_step(self) -> None:
        """Take note of a step without tokens: as vLLM's workers, stages wait in it for the tokens that are due."""
        tokens = self._tokens_sent.popleft()
        self._tokens_sent.append(None)
        if tokens is not None:
            for device in self.devices[:-1]:
                device.wait_for(tokens)

    def receive(self, step: NodeStep, stage: int) -> None:
        """Have a stage wait for the activations of the stage before, and for tokens that the last stage sampled."""
        if step.tokens_before is not None and stage + 1 < self.num_stages:
            self.devices[stage].wait_for(step.tokens_before)
        if stage > 0:
            self.devices[stage].wait_for(step.arrivals[stage])

    def compute(self, step: NodeStep, stage: int) -> None:
        """Have a stage compute a step, and send its activations on."""
        self.devices[stage].compute(step.stage_s[stage], step.kv, lambda: self._end(step, stage))

    def _end(self, step: NodeStep, stage: int) -> None:
        now_s = self.now_s
        if stage == 0 and step is self._last_step:
            self._first_stage_free_s = now_s
        if stage + 1 == self.num_stages:
            step.done.fire(now_s)
            sent_s = now_s + self._link.send_s(step.num_outputs * _TOKEN_BYTES)
            self._queue.at(sent_s, Priority.ARRIVAL, lambda: step.tokens_sent.fire(sent_s))
            return
        # One channel between two stages: nothing sent later arrives earlier.
        arrival_s = max(self._last_arrival_s[stage + 1], now_s + self._link.send_s(step.activation_bytes))
        self._last_arrival_s[stage + 1] = arrival_s
        arrived = step.arrivals[stage + 1]
        self._queue.at(arrival_s, Priority.ARRIVAL, lambda: arrived.fire(arrival_s))


def _layout(model: ModelSpec, num_layers: int, parallelism: Parallelism) -> BlockLayout:
    return compact_layout(
        num_layers=num_layers,
        num_kv_heads=-(-model.num_kv_heads // model.kv_shards(parallelism.tensor)),
        block_tokens=BLOCK_TOKENS,
        content_bytes=2 * model.head_dim * model.kv_value_bytes,
    )
