"""vLLM's scheduler, ours on top, and in place of the workers something that knows what every block must hold.

Blocks of both pools hold the tokens whose KV they would hold, and None where KV would be garbage. A step that would
read anything but its request's own tokens fails, so that eviction, prefetch, sharing and reuse are checked without a
model, thousands of steps a second. Output tokens are a function of all the tokens before them.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from pipemax.config import EngineConfig
from pipemax.domain.units import ceil_div
from pipemax.transfer.commands import BlockPrefetch, BlockStore, StepCopies
from pipemax.vllm_ext.launch.vllm_config import launch_environment, make_vllm_config
from pipemax.vllm_ext.runtime_settings import RuntimeSettings
from pipemax.vllm_ext.scheduler.scheduler import PipeMaxAsyncScheduler, PipeMaxScheduler
from pipemax.vllm_ext.worker.connector import StepMetadata
from tests.fakes.vllm_kinds import asynchronous_scheduling_on_cpu, runner_version

BLOCK_TOKENS = 4
MAX_MODEL_LEN = 64
MODEL = Path(__file__).parents[3] / "examples" / "model"


def make_scheduler(
    *,
    gpu_blocks: int,
    host_blocks: int,
    num_batches: int,
    stages: int = 1,
    chunk_tokens: int = 64,
    stores_tokens: bool = False,
    max_num_seqs: int = 16,
    runner: int = 1,
    asynchronous: bool = False,
    windows: Sequence[int | None] = (None,),
    **more: Any,
) -> PipeMaxScheduler:
    """As the engine core would make it, for vLLM's model runner of this version.

    ``windows`` has an entry for each group of layers: its window in tokens, None for full attention.
    """
    config = EngineConfig(
        model=str(MODEL),
        policy="pipemax",
        pipeline_parallel_size=stages,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=chunk_tokens,
        num_batches=num_batches,
        enable_prefix_caching=not any(windows),
        # No weights are loaded: any number of layers will do, and each stage needs one.
        vllm={"enable_chunked_prefill": True, "hf_overrides": {"num_hidden_layers": 8}},
    )
    vllm_config = _vllm_config(config, gpu_blocks, runner, asynchronous)
    extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
    settings = RuntimeSettings.from_extra_config(extra_config)
    small = replace(
        settings, host_kv_tokens=host_blocks * BLOCK_TOKENS, stores_tokens=stores_tokens, controller=more
    )
    extra_config.update(small.to_extra_config())
    cls = PipeMaxAsyncScheduler if asynchronous else PipeMaxScheduler
    with runner_version(runner):
        return _construct(cls, vllm_config, gpu_blocks, windows)


def make_stock_scheduler(
    *,
    is_tunable: bool,
    gpu_blocks: int = 40,
    stages: int = 1,
    step_tokens: int = 64,
    max_num_seqs: int = 16,
    runner: int = 1,
    asynchronous: bool = False,
    vllm: dict[str, Any] | None = None,
) -> Scheduler:
    """As the engine core would make it under policy vllm, or vLLM's own in its place."""
    config = EngineConfig(
        model=str(MODEL),
        policy="vllm",
        pipeline_parallel_size=stages,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=step_tokens,
        vllm={"enable_chunked_prefill": True, "hf_overrides": {"num_hidden_layers": 8}, **(vllm or {})},
    )
    vllm_config = _vllm_config(config, gpu_blocks, runner, asynchronous)
    if not is_tunable:
        vllm_config.scheduler_config.scheduler_cls = None
    with runner_version(runner):
        return _construct(vllm_config.scheduler_config.get_scheduler_cls(), vllm_config, gpu_blocks, (None,))


def _vllm_config(config: EngineConfig, gpu_blocks: int, runner: int, asynchronous: bool) -> VllmConfig:
    synchrony = asynchronous_scheduling_on_cpu() if asynchronous else nullcontext()
    with launch_environment(config), runner_version(runner), synchrony:
        vllm_config = make_vllm_config(config)
    vllm_config.cache_config.num_gpu_blocks = gpu_blocks + 1  # vLLM keeps one as its null block
    return vllm_config


def _construct(
    cls: Callable[..., Any], vllm_config: VllmConfig, gpu_blocks: int, windows: Sequence[int | None]
) -> Any:
    shape: dict[str, Any] = {
        "block_size": BLOCK_TOKENS,
        "num_kv_heads": 1,
        "head_size": 1,
        "dtype": vllm_config.model_config.dtype,
    }
    groups = [
        KVCacheGroupSpec(
            layer_names=[f"layer {group}"],
            kv_cache_spec=SlidingWindowSpec(**shape, sliding_window=window)
            if window
            else FullAttentionSpec(**shape),
        )
        for group, window in enumerate(windows)
    ]
    init_none_hash(sha256)
    return cls(
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(
            num_blocks=gpu_blocks + 1,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
        ),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=BLOCK_TOKENS,
        log_stats=True,
    )


def equal_cores(*, asynchronous: bool, **more: Any) -> list["FakeCore"]:
    """Return two cores of two stages that behave alike, with as many steps in flight as vLLM has with them."""
    return [
        FakeCore(
            make_scheduler(
                gpu_blocks=40, host_blocks=300, stages=2, runner=2, asynchronous=asynchronous, **more
            ),
            3 if asynchronous else 2,
        )
        for _ in range(2)
    ]


def make_request(request_id: str, prompt: list[int], max_tokens: int) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
    )


def state_of(scheduler: PipeMaxScheduler) -> list[object]:
    """Return all that later steps read of the requests and of vLLM's blocks."""
    hidden = {"arrival_time", "events", "sampling_params", "structured_output_request", "_block_hasher"}
    requests = [
        {name: repr(value) for name, value in vars(request).items() if name not in hidden}
        for request in sorted(scheduler.requests.values(), key=lambda request: request.request_id)
    ]
    manager = scheduler.kv_cache_manager
    group = manager.coordinator.single_type_managers[0]
    tables = {name: [block.block_id for block in blocks] for name, blocks in group.req_to_blocks.items()}
    hashes = {
        block.block_id: block.block_hash
        for block in manager.block_pool.blocks
        if block.block_hash is not None
    }
    queues = (scheduler.running, scheduler.waiting, scheduler._inflight_prefills)
    ids = [{request.request_id for request in queue} for queue in queues]
    counts = [scheduler.current_step, scheduler.finished_req_ids, scheduler.reset_preempted_req_ids]
    return [requests, tables, dict(group.num_cached_block), hashes, ids, counts]


def next_token(tokens: list[int]) -> int:
    return (hash(tuple(tokens)) % 997) + 3


def expected_output(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = [*prompt]
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeWorker:
    """The first stage; what it computes, it computes at once, first in, first out.

    ``num_slots``: of the V2 runner, which forgets a request that is preempted; the V1 runner forgets none.
    ``stages``: the V2 runner learns the tokens of a step that many steps later.
    ``windows``: of each group of layers, in tokens; None for full attention.
    """

    def __init__(
        self, num_slots: int | None = None, stages: int = 1, windows: Sequence[int | None] = (None,)
    ) -> None:
        self._num_slots = num_slots
        self._windows = windows
        self._stages = stages
        self._num_steps = 0
        self.next_token = next_token
        self._sampled_at: dict[str, int] = {}
        self.num_resent = 0
        self.gpu: dict[int, list[int | None]] = {}
        self.host: dict[int, list[int | None]] = {}
        self._late: tuple[BlockPrefetch, ...] = ()
        """Prefetches of the step before that this one must not need."""
        self.num_later_prefetches = 0
        self.num_wave_prefetches = 0
        self.num_abandoned = 0
        self._tokens: dict[str, list[int]] = {}
        self.tables: dict[str, list[list[int]]] = {}
        """By group of layers."""
        self.computed: dict[str, int] = {}
        """The tokens that the last step's requests had before it."""

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        metadata = output.kv_connector_metadata
        assert isinstance(metadata, StepMetadata)
        if metadata.copies.abandons_prefetches:
            self.num_abandoned += bool(self._late)
            self._load(self._late)
            self._late = ()
        self._store(metadata.copies.saves)
        prefetches, later_prefetches = (*metadata.copies.prefetches,), (*metadata.copies.later_prefetches,)
        for prefetch in prefetches + later_prefetches:
            assert prefetch.source in self.host, f"host block {prefetch.source} was never stored"
            self.gpu[prefetch.target] = [None] * BLOCK_TOKENS  # garbage until the step is over
        preempted = output.preempted_req_ids or set() if self._num_slots else set()
        for request_id in output.finished_req_ids | preempted:
            self._tokens.pop(request_id, None)
            self.tables.pop(request_id, None)
            self._sampled_at.pop(request_id, None)
        self._num_steps += 1
        self._update_tables(output)
        assert self._num_slots is None or len(self._tokens) <= self._num_slots, "no free slot"
        sampled = {name: self._run(name, count) for name, count in output.num_scheduled_tokens.items()}
        assert metadata.copies.in_groups or not metadata.copies.wave_prefetches
        # Behind the computation, and before the stores of what it wrote: none may read what the wave overwrites.
        self._load((*metadata.copies.wave_prefetches,))
        self.num_wave_prefetches += len(metadata.copies.wave_prefetches)
        self._store(metadata.copies.stores)
        for tokens in metadata.copies.token_stores:
            slots = slice(tokens.first_slot, tokens.first_slot + tokens.num_slots)
            kept = self.host.setdefault(tokens.target, [None] * BLOCK_TOKENS)
            kept[slots] = self.gpu[tokens.source][slots]
        self._load(self._late + prefetches)
        self._late = later_prefetches
        self.num_later_prefetches += len(self._late)
        names = [*sampled]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
        )

    def _store(self, stores: Sequence[BlockStore]) -> None:
        for store in stores:
            self.host[store.target] = [*self.gpu[store.source]]

    def _load(self, prefetches: tuple[BlockPrefetch, ...]) -> None:
        for prefetch in prefetches:
            self.gpu[prefetch.target] = [*self.host[prefetch.source]]

    def _update_tables(self, output: SchedulerOutput) -> None:
        self.computed = {}
        for new in output.scheduled_new_reqs:
            self._tokens[new.req_id] = [*(new.prefill_token_ids or new.prompt_token_ids)]
            self.num_resent += len(self._tokens[new.req_id]) > len(new.prompt_token_ids)
            self.tables[new.req_id] = [[*table] for table in new.block_ids]
            self.computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[index]
            if name in cached.resumed_req_ids:
                self.tables[name] = [[*table] for table in blocks]
            elif blocks is not None:
                for table, more in zip(self.tables[name], blocks, strict=True):
                    table += more
            self.computed[name] = cached.num_computed_tokens[index]

    def _run(self, name: str, count: int) -> list[int]:
        computed, tokens = self.computed[name], self._tokens[name]
        for group, (table, window) in enumerate(zip(self.tables[name], self._windows, strict=True)):
            assert len(table) >= ceil_div(computed + count, BLOCK_TOKENS), (name, computed, count, table)
            first = 0 if window is None else max(0, computed - window + 1)
            seen = [self._slot(table, position) for position in range(first, computed)]
            own = [_kv(token, group) for token in tokens]
            assert seen == own[first:computed], f"{name} attends to {seen}, not to {own[first:computed]}"
            for position in range(computed, computed + count):
                block = self.gpu.setdefault(table[position // BLOCK_TOKENS], [None] * BLOCK_TOKENS)
                block[position % BLOCK_TOKENS] = own[position]
        if self._num_slots and name in self._sampled_at:
            assert self._num_steps >= self._sampled_at[name] + self._stages, f"{name} lacks its last token"
        if computed + count < len(tokens):
            return []
        self._sampled_at[name] = self._num_steps
        tokens.append(self.next_token(tokens))
        return tokens[-1:]

    def _slot(self, table: list[int], position: int) -> int | None:
        return self.gpu[table[position // BLOCK_TOKENS]][position % BLOCK_TOKENS]


def _kv(token: int, group: int) -> int:
    """What a slot holds of a token: other KV in each group of layers."""
    return token if group == 0 else -10_000 * group - token


class FakeCore:
    """vLLM's engine core: schedules up to ``depth`` steps before it takes the first one's outputs."""

    def __init__(self, scheduler: Any, depth: int = 1, *, checks_blocks: bool = True) -> None:
        self.scheduler = scheduler
        self._checks_blocks = checks_blocks
        groups = scheduler.kv_cache_config.kv_cache_groups
        self.worker = FakeWorker(
            scheduler.max_num_running_reqs if scheduler.use_v2_model_runner else None,
            scheduler.parallel_config.pipeline_parallel_size,
            [getattr(group.kv_cache_spec, "sliding_window", None) for group in groups],
        )
        self.outputs: dict[str, list[int]] = {}
        self._depth = depth
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.num_steps = 0

    def add(self, request: Request) -> None:
        self.scheduler.add_request(request)

    def abort(self, request_ids: list[str]) -> None:
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def step(self) -> SchedulerOutput:
        output = self._schedule()
        self._in_flight.append((output, self.worker.execute(output)))
        self._check()
        self.num_steps += 1
        if len(self._in_flight) == self._depth or not output.num_scheduled_tokens:
            self._complete()
        return output

    def run(self, max_steps: int = 20_000) -> dict[str, list[int]]:
        while self.scheduler.get_num_unfinished_requests():
            assert self.num_steps < max_steps, "requests do not finish"
            self.step()
        while self._in_flight:
            self._complete()
        self._check_empty()
        return self.outputs

    def _schedule(self) -> SchedulerOutput:
        return self.scheduler.schedule()

    def _check_empty(self) -> None:
        scheduler = self.scheduler
        assert scheduler._host.num_free == scheduler._host.num_blocks, "host blocks leak"
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1

    @property
    def counters(self) -> Any:
        return self.scheduler._counters

    def _complete(self) -> None:
        outputs = self.scheduler.update_from_output(*self._in_flight.popleft())
        for client_outputs in outputs.values():
            for output in client_outputs.outputs:
                self.outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
        self._check()

    def _check(self) -> None:
        if not self._checks_blocks:
            return
        scheduler = self.scheduler
        scheduler._host.check_integrity()
        pool = scheduler.kv_cache_manager.block_pool
        held = {
            block.block_id
            for manager in scheduler.kv_cache_manager.coordinator.single_type_managers
            for blocks in manager.req_to_blocks.values()
            for block in blocks
            if not block.is_null
        }
        assert pool.get_num_free_blocks() + len(held) == pool.num_gpu_blocks - 1, "GPU blocks leak"


class StockCore(FakeCore):
    """The same over a scheduler of stock vLLM, which moves no KV."""

    def _schedule(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        output.kv_connector_metadata = StepMetadata(self.num_steps, StepCopies())
        return output

    def _check(self) -> None:
        pass

    def _check_empty(self) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "GPU blocks leak"
