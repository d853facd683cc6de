"""The machine that every system runs on: a pipeline of stages, the links, and their measured usage."""

from collections.abc import Callable, Sequence

from pipemax.domain.specs import KvCapacity, ModelSpec, NodeSpec, Parallelism, block_layers, kv_capacity
from pipemax.sim.event_queue import EventQueue, Priority
from pipemax.sim.links import Links
from pipemax.sim.measured_engine import MeasuredEngine, MeasuredTimes
from pipemax.sim.pipeline import Pipeline, Step, StepKind
from pipemax.sim.result import DecodeSample, Progress, Recording, SimulationResult, Usage, summarize
from pipemax.sim.stage_times import StageTimes, StepWork
from pipemax.sim.workloads import Workload

BLOCK_TOKENS = 16
_PREFILL_STEP_TOKENS = (1024, 2048, 4096, 8192)
_PREFILL_ARITHMETIC_OVER_WEIGHTS = 4.0


def prefill_step_tokens(node: NodeSpec, model: ModelSpec) -> int:
    """Return the tokens of one prefill step, in every system that separates prefill from decode.

    This is the smallest of the usual sizes whose arithmetic takes four times as long as reading the weights: larger
    steps fill and drain the pipeline more slowly, but a mixture of experts needs them.
    """
    weights_s = model.weight_bytes / node.gpu.hbm_bytes_per_s
    token_s = 2 * model.active_params / node.gpu.product_flops_per_s(model.weight_dtype)
    enough = _PREFILL_ARITHMETIC_OVER_WEIGHTS * weights_s / token_s
    return next((size for size in _PREFILL_STEP_TOKENS if size >= enough), _PREFILL_STEP_TOKENS[-1])


class Machine:
    """One node under one parallelism. A system that changes parallelism makes another machine on the same queue."""

    def __init__(
        self,
        queue: EventQueue,
        links: Links,
        node: NodeSpec,
        model: ModelSpec,
        parallelism: Parallelism,
        recording: Recording,
        *,
        measured: MeasuredEngine | None = None,
        block_tokens: int = BLOCK_TOKENS,
        shared_tokens: int = 0,
        frees_windows: bool = False,
        gate: Callable[[int, Step, int], bool] | None = None,
        on_stage_start: Callable[[int, Step], None] | None = None,
        on_part_end: Callable[[int, Step, int], None] | None = None,
    ) -> None:
        self.queue = queue
        self.links = links
        self.node = node
        self.model = model
        self.parallelism = parallelism
        self.recording = recording
        self.measured = measured
        self.times: StageTimes | MeasuredTimes
        self.capacity: KvCapacity
        if measured is None:
            self.times = StageTimes(node, model, parallelism)
            self.capacity = kv_capacity(
                node, model, parallelism, block_tokens=block_tokens, frees_windows=frees_windows
            )
        else:
            self.times = MeasuredTimes(measured)
            self.capacity = measured.stock_capacity if frees_windows else measured.capacity
        self.room_layers = block_layers(model, parallelism, frees_windows=frees_windows)
        """For how many layers a block has room, by stage."""
        self.usage = Usage()
        self._shared_tokens = shared_tokens
        self.pipeline = Pipeline(
            queue,
            parallelism.pipeline,
            send=self.send_s,
            gate=gate,
            on_stage_start=on_stage_start,
            on_part_end=on_part_end,
            on_stall=self._stalled,
            on_span=recording.stage_spans.append if recording.keep_spans else None,
        )

    @property
    def prefill_step_tokens(self) -> int:
        """See the function ``prefill_step_tokens``. A measured engine has a size of its own."""
        if self.measured is not None:
            return self.measured.max_batched_tokens
        return prefill_step_tokens(self.node, self.model)

    def block_bytes(self, stage: int) -> float:
        """Return the bytes of one KV block on one GPU of a stage."""
        share = self.room_layers[stage] / self.parallelism.layers_of(self.model)[stage]
        return self.capacity.block_tokens * self.times.kv_bytes_per_token(stage) * share

    def gpus_of(self, stage: int) -> range:
        tensor = self.parallelism.tensor
        return range(stage * tensor, (stage + 1) * tensor)

    def _stalled(self, seconds: float) -> None:
        """Count that the GPUs of a stage waited for copies with a step at hand."""
        self.usage.stalled_gpu_s += seconds * self.parallelism.tensor

    def run(
        self,
        work: StepWork,
        on_done: Callable[[Step], None],
        *,
        prefetched_tokens: int = 0,
        num_parts: int = 1,
    ) -> Step:
        """Send one step through the pipeline; ``on_done`` is called when the last stage ends it.

        ``num_parts``: into how many groups of layers it is divided on each stage.
        """
        if work.prefill_tokens == 0:
            kind = StepKind.DECODE
        else:
            kind = StepKind.MIXED if work.decode_requests else StepKind.PREFILL
        stage_s = self.times.stage_s(work)
        if work.decode_requests:
            self.usage.decode_steps += 1
            self.usage.decode_requests += work.decode_requests
        tensor = self.parallelism.tensor
        self.usage.busy_gpu_s += sum(stage_s) * tensor
        if kind is StepKind.DECODE:
            self.usage.decode_gpu_s += sum(stage_s) * tensor
        all_reduce_s = self.times.all_reduce_layer_s(work.tokens) * self.model.num_layers
        self.usage.all_reduce_gpu_s += all_reduce_s * tensor

        def done(step: Step) -> None:
            self.usage.tokens_done += work.tokens + work.prefill_outputs * (1 + self._shared_tokens)
            if kind is StepKind.DECODE:
                self.recording.decode_samples.append(
                    DecodeSample(
                        time_s=self.queue.now_s(),
                        step_s=max(stage_s),
                        batch=work.decode_requests,
                        kv_tokens=work.decode_context_tokens,
                        prefetched_tokens=prefetched_tokens,
                    )
                )
            if self.measured is None:
                on_done(step)
            else:
                told_s = self.queue.now_s() + self.measured.round_trip_s
                self.queue.at(told_s, Priority.ARRIVAL, lambda: on_done(step))

        step = Step(
            kind=kind,
            stage_s=stage_s,
            activation_bytes=self.times.activation_bytes(work.tokens),
            on_done=done,
            batch=work.decode_requests,
            tokens=work.tokens,
            num_parts=num_parts,
        )
        self.pipeline.submit(step)
        return step

    def send_s(self, stage: int, activation_bytes: float) -> float:
        """Return how long a stage's activations take to the next stage: they go before copies."""
        return self.node.link.send_s(activation_bytes)


def summarize_machines(
    system: str,
    workload: Workload,
    machines: Sequence[Machine],
    progress: Progress,
    *,
    recomputed_tokens: int = 0,
) -> SimulationResult:
    """Summarize a run that has just ended, on machines of one node and queue, the last of which decoded."""
    last = machines[-1]
    return summarize(
        system,
        workload,
        [machine.usage for machine in machines],
        last.links,
        progress,
        last.recording,
        num_gpus=last.node.num_gpus,
        gpu_kv_tokens=last.capacity.gpu_tokens,
        seconds=last.queue.now_s(),
        recomputed_tokens=recomputed_tokens,
    )
