"""vLLM's scheduler, told what to schedule: vLLM's events go in, ``StepPlan`` comes out into vLLM's structures.

There is no policy here; ``pipemax.control`` decides. Each step, vLLM's own ``schedule`` sees only the planned requests
and does all the rest: blocks, prefix cache, structured output, the messages to the workers. All other requests are set
aside, in dictionaries that no step walks through.

    set aside what vLLM holds → admit → plan → recompute, evict, prefetch → schedule the planned → report

The same code runs over vLLM's synchronous scheduler and over its asynchronous one, which schedules a step before it
has the outputs of the last. The controller plans a request whose last token is still on the way only if the first stage
has that token by then, as vLLM itself does; it may evict any request, because steps are first in, first out on every
worker.
"""

import time
from collections.abc import Sequence
from typing import Any

from pipemax.control.controller import Controller
from pipemax.control.controller_config import StageConfig
from pipemax.domain.events import (
    Event,
    GpuBlocksObserved,
    InputEnded,
    InputOpened,
    PrefetchRefused,
    PrefixCacheHit,
    RequestAborted,
    RequestAdmitted,
    RequestPreempted,
    RunRefused,
    StepCompleted,
)
from pipemax.domain.plain_values import decode, encode
from pipemax.domain.plan import Batching, StepPlan
from pipemax.domain.request import RequestSpec
from pipemax.domain.units import RequestId, ceil_div
from pipemax.vllm_ext.compat import check_kv_cache, kv_groups
from pipemax.vllm_ext.runtime_settings import RuntimeSettings
from pipemax.vllm_ext.scheduler.blocked_requests import BlockedRequests
from pipemax.vllm_ext.scheduler.kv_moves import KvMoves
from pipemax.vllm_ext.scheduler.pools import make_pools
from pipemax.vllm_ext.scheduler.prefix_finder import PrefixFinder
from pipemax.vllm_ext.scheduler.scheduler_stats import Counters, demand_stats
from pipemax.vllm_ext.scheduler.step_copies import CopyGatherer
from pipemax.vllm_ext.scheduler.worker_slots import UNLIMITED, WorkerState
from pipemax.vllm_ext.seam.core_client import answer_calls
from pipemax.vllm_ext.seam.decode_schedule import can_schedule_decodes, schedule_decodes
from pipemax.vllm_ext.seam.planned_scheduler import PlannedScheduler
from pipemax.vllm_ext.seam.vllm_types import (
    AsyncScheduler,
    EngineCoreOutputs,
    ModelRunnerOutput,
    NewRequestData,
    Request,
    SchedulerOutput,
    SchedulerStats,
)
from pipemax.vllm_ext.worker.connector import StepMetadata
from pipemax.vllm_ext.worker.stage_reports import ReportBook, WorkerReports


class PipeMaxScheduler(PlannedScheduler):
    """Runs over vLLM's synchronous scheduler; ``seam`` has what it relies on there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_kv_cache(self.kv_cache_config)
        transfer_config = self.vllm_config.kv_transfer_config
        assert transfer_config is not None, "PipeMax's scheduler runs only with its connector"
        settings = RuntimeSettings.from_extra_config(transfer_config.kv_connector_extra_config)
        groups = kv_groups(self.kv_cache_config)
        self._gpu, self._host = make_pools(self.kv_cache_manager, self.block_size, groups, settings)
        self._frees_windows = groups.window > 0
        self._copies = CopyGatherer(self._gpu, self._host, self.block_size)
        self._prefixes = PrefixFinder(self.block_size)
        parallel = self.parallel_config
        self._reports = ReportBook(parallel.pipeline_parallel_size, parallel.tensor_parallel_size)
        self._planned_tokens: dict[str, int] = {}  # in the step that vLLM is asked for
        num_slots = self.max_num_running_reqs if self.use_v2_model_runner else UNLIMITED
        self._workers = WorkerState(num_slots)
        self._moves = KvMoves(self._gpu, self._host, self._copies, self._workers, self.block_size)
        self._controller = Controller(
            settings.controller_config(
                gpu_blocks=self._gpu.num_free,
                block_tokens=self.block_size,
                prefill_chunk_tokens=self.max_num_scheduled_tokens,
                max_slots=num_slots,
                groups=groups,
            )
        )
        self._events: list[Event] = []
        self._learns_times = True
        # Those that have started keep vLLM's status RUNNING, whether the current step runs them or not.
        self._started: dict[str, Request] = {}
        self._not_started: dict[str, Request] = {}  # without those that the current step runs
        self._blocked = BlockedRequests()  # unknown to the controller
        self._ended: list[str] = []  # finished or aborted, not yet told
        self._counters = Counters()
        self._num_added = 0
        self._plan: StepPlan | None = None  # being carried out
        self._resent: list[NewRequestData] = []  # in the step being made: they had lost their slots
        self._schedules_decodes = can_schedule_decodes(self)
        answer_calls()

    # -- calibration, while nothing runs ----------------------------------------------------------------------

    def take_profile(self) -> dict[str, Any]:
        """See ``core_calls.take_profile``."""
        profile: dict[str, Any] = encode(self._controller.times.take_profile())
        return profile

    def recalibrate(self, stages: list[dict[str, Any]]) -> None:
        """See ``core_calls.recalibrate``. Also starts all counts again."""
        self._controller.recalibrate([decode(StageConfig, stage) for stage in stages])
        self._counters, self._num_added = Counters(), 0

    def resize_gpu(self, gpu_blocks: int | None) -> None:
        """See ``core_calls.resize_gpu``. Also starts all counts again."""
        self._settle()
        self._gpu.resize(gpu_blocks)
        self._prefixes = PrefixFinder(self.block_size)
        self._controller.resize_gpu(self._gpu.num_free)
        self._counters, self._num_added = Counters(), 0

    def learn_times(self, is_on: bool) -> None:
        """See ``core_calls.fixed_times``."""
        self._learns_times = is_on

    def use_batching(self, batching: str, mixed_step_tokens: int | None = None) -> None:
        """See ``core_calls.use_batching``. Also starts all counts again."""
        self._settle()
        most_tokens = self.scheduler_config.max_num_batched_tokens
        if mixed_step_tokens is not None and mixed_step_tokens > most_tokens:
            raise ValueError(
                f"mixed steps of {mixed_step_tokens} tokens, more than the {most_tokens} of any step"
            )
        self._controller.use_batching(Batching(batching), mixed_step_tokens)
        self._counters, self._num_added = Counters(), 0

    def _settle(self) -> None:
        """Tell the controller what has happened since the last step."""
        self._report_ended()
        self._controller.apply(self._events)
        self._events.clear()

    def copy_counts(self) -> dict[str, float]:
        """See ``core_calls.copy_counts``."""
        counters = self._counters
        return {
            "evictions": counters.evictions,
            "prefetches": counters.prefetches,
            "prefetched_blocks": counters.prefetched_blocks,
            "stall_s": max(self._reports.stall_s),
        }

    # -- what the engine's side says --------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self._num_added += 1

    def set_input_open(self, is_open: bool) -> None:
        """See ``core_calls.set_input_open``."""
        self._events.append(InputOpened() if is_open else InputEnded())

    # -- a step -----------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        begin_s = time.perf_counter()
        self._report_ended()
        self._set_aside()
        self._admit_unblocked()
        self._gpu.publish()
        events, self._events = self._events, []
        self._controller.apply(events)
        plan = self._plan = self._controller.plan_step(time.monotonic())
        self._make_room(plan)
        if self._frees_windows:
            self._free_skipped(plan)
        if plan.overwrite is None:
            self._prefetch_planned(plan)
        self._gpu.return_vacated()
        output = self._run(plan)
        self._counters.schedule_s += time.perf_counter() - begin_s
        return output

    def _set_aside(self) -> None:
        """Empty vLLM's queues of the requests that ran last and those that arrived since."""
        self.running = []
        for queue in (self.kv_holding_waiting, self.waiting):
            while queue:
                request = queue.pop_request()
                if self.is_blocked(request):
                    self._blocked.add(request)
                else:
                    self._admit(request)

    def _admit_unblocked(self) -> None:
        for request in self._blocked.take_compiled():
            if self.unblock(request):
                self._admit(request)

    def _admit(self, request: Request) -> None:
        self._not_started[request.request_id] = request
        room = self.max_model_len - request.num_prompt_tokens
        # A request that does not read the prefix cache finds nothing of its prefix on the GPU.
        is_read = self.cache_config.enable_prefix_caching and not request.skip_reading_prefix_cache
        prefix = self._prefixes.find(request.block_hashes) if is_read else None
        if prefix is not None:
            self._moves.note_prefix(request.request_id, prefix.num_tokens // self.block_size)
        spec = RequestSpec(
            request_id=RequestId(request.request_id),
            prompt_tokens=request.num_prompt_tokens,
            max_tokens=max(1, min(request.max_tokens, room)),
            prefix=prefix,
        )
        self._events.append(RequestAdmitted(request=spec))

    def _make_room(self, plan: StepPlan) -> None:
        self._moves.evict_overwritten(self._started)
        for request_id in plan.recompute:
            request = self._started.pop(request_id)
            self.drop_kv(request)
            self._not_started[request_id] = request
            self._moves.drop(request_id)
        for request_id in plan.evict:
            self._moves.evict(self._started[request_id])

    def _free_skipped(self, plan: StepPlan) -> None:
        """Free what the planned step no longer attends to; the plan counts on it."""
        for request_id in plan.run:
            if (request := self._started.get(request_id)) is not None:
                self._gpu.free_skipped(request)

    def _prefetch_planned(self, plan: StepPlan) -> None:
        for item in plan.prefetch:
            if not self._moves.prefetch(self._started[item.request_id], item, self._counters):
                self._events.append(PrefetchRefused(step_id=plan.step_id, request_id=item.request_id))

    def _run(self, plan: StepPlan) -> SchedulerOutput:
        """Run vLLM's own ``schedule`` over the planned requests, and report what became of them."""
        new_requests: list[Request] = []
        self.running = [self._started[request_id] for request_id in plan.run if request_id in self._started]
        if len(self.running) < len(plan.run):
            new_requests = [self._not_started.pop(one) for one in plan.run if one not in self._started]
            for request in new_requests:
                self.waiting.add_request(request)
        self._planned_tokens = dict(zip(plan.run, plan.run_tokens, strict=True))
        output = (schedule_decodes(self) if self._schedules_decodes else None) or super().schedule()
        output.scheduled_new_reqs.extend(self._resent)
        self._resent.clear()
        while self.waiting:  # without blocks
            request = self.waiting.pop_request()
            self._not_started[request.request_id] = request
        ran: dict[str, int] = output.num_scheduled_tokens
        if len(ran) < len(plan.run):
            refused = [request_id for request_id in plan.run if request_id not in ran]
            self._events += [RunRefused(step_id=plan.step_id, request_id=one) for one in refused]
        for request in new_requests:
            if request.request_id in ran:
                self._started[request.request_id] = request
            num_found = request.num_computed_tokens - ran.get(request.request_id, 0)
            if num_found > 0:
                hit = PrefixCacheHit(
                    step_id=plan.step_id, request_id=RequestId(request.request_id), num_tokens=num_found
                )
                self._events.append(hit)
        self._events.append(GpuBlocksObserved(num_free=self._gpu.num_free))
        self._counters.count_run(plan, ran)
        return output

    # -- what vLLM's step asks --------------------------------------------------------------------------------

    def planned_tokens(self, request_id: str) -> int:
        return self._planned_tokens[request_id]

    def fitting_prefix(self, request: Request, blocks: Sequence[Any], num_found: int) -> int:
        """Cut a found prefix so that the planned chunk behind it still fits.

        Found blocks that nobody holds are taken from the free ones, which the plan counted on for the chunk. If both
        do not fit, only what other requests hold is taken.
        """
        if self._frees_windows:
            return num_found  # there is no prefix cache
        num_held: int = sum(block.ref_cnt > 0 for block in blocks)
        num_tokens = min(request.num_tokens, num_found + self._planned_tokens[request.request_id])
        if ceil_div(num_tokens, self.block_size) - num_held > self._gpu.num_free:
            return num_held * self.block_size
        return num_found

    def sort_started(
        self, requests: list[Request], scheduled: dict[str, int]
    ) -> tuple[list[Request], list[Request]]:
        """Tell the workers of requests that were prefetched, or that lost their slots, since they ran.

        One that lost its slot is sent as new, with its tokens so far.
        """
        news = self._workers.news(requests, scheduled)
        # In vLLM's terms they are preempted: the V2 runner frees such slots before it assigns any.
        self.reset_preempted_req_ids.update(news.dropped)
        for request in news.resent:
            blocks = self._gpu.tables(request.request_id)
            self._resent.append(self._workers.resend(request, blocks))
        return news.known, news.moved

    def step_metadata(self, output: SchedulerOutput) -> StepMetadata:
        """Return the plan's prefetches, and the stores that keep every replica complete."""
        plan = self._plan
        assert plan is not None
        self._copies.store(self.requests, output.num_scheduled_tokens)
        in_groups = plan.overwrite is not None and bool(output.num_scheduled_tokens)
        if plan.overwrite is not None:
            # Not before vLLM has given the step its blocks: it would give it those that the wave overwrites.
            self._moves.overwrite(self.requests[request_id] for request_id in plan.overwrite)
            self._prefetch_planned(plan)
            self._gpu.return_vacated()
        copies = self._copies.take(in_groups=in_groups)
        return StepMetadata(plan.step_id, copies)

    # -- outputs, and whatever ends requests ------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        self._report_ended()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        ran = scheduler_output.num_scheduled_tokens
        if ran:
            finished = tuple(RequestId(request_id) for request_id in self._ended if request_id in ran)
            metadata = scheduler_output.kv_connector_metadata
            assert isinstance(metadata, StepMetadata), metadata
            self._events.append(StepCompleted(step_id=metadata.step_id, finished=finished))
            self._ended = [request_id for request_id in self._ended if request_id not in ran]
        self._take_reports(model_runner_output)
        return outputs

    def _take_reports(self, model_runner_output: ModelRunnerOutput) -> None:
        connector_output = model_runner_output.kv_connector_output
        reports = connector_output.kv_connector_worker_meta if connector_output else None
        if reports is not None:
            assert isinstance(reports, WorkerReports), reports
            events = self._reports.take_in(reports.by_stage)
            if self._learns_times:
                self._events += events

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None and self._plan is not None:
            stats.kv_connector_stats = {
                **self._counters.to_stats(self._controller, self._plan, self._reports),
                **demand_stats(
                    self._controller,
                    num_known=self._num_added - len(self.waiting) - len(self.kv_holding_waiting),
                    num_blocked=len(self._blocked),
                ),
            }
        return stats

    def _report_ended(self) -> None:
        """Report as aborted the requests that ended outside of a step's outputs."""
        self._events += [RequestAborted(request_id=RequestId(request_id)) for request_id in self._ended]
        self._ended.clear()

    def request_freed(self, request: Request) -> None:
        request_id = request.request_id
        self._ended.append(request_id)
        for aside in (self._started, self._not_started):
            aside.pop(request_id, None)
        self._blocked.discard(request)
        self._moves.forget(request_id)

    def kv_dropped(self, request: Request) -> None:
        self._started.pop(request.request_id, None)
        self._not_started[request.request_id] = request
        self._moves.drop(request.request_id)
        self._events.append(RequestPreempted(request_id=RequestId(request.request_id)))

    def get_request_counts(self) -> tuple[int, int]:
        """Return (running, waiting), including the requests set aside."""
        num_waiting = super().get_request_counts()[1]
        return len(self._started), num_waiting + len(self._not_started) + len(self._blocked)


class PipeMaxAsyncScheduler(PipeMaxScheduler, AsyncScheduler):
    """Runs over vLLM's asynchronous scheduler, which counts tokens before it knows them."""
