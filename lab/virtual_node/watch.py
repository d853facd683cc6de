"""Watch a rehearsed engine as it runs: how much KV is where, and what the stages did until the drain."""

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from lab.virtual_node.executor import VirtualNodeExecutor
from lab.virtual_node.steady_part import KvSample, SteadyPart
from pipemax.vllm_ext.scheduler.scheduler import PipeMaxScheduler

_MOST_SAMPLES = 400


class RunWatch:
    """Reads the pools after each step, and the node's counts once. Call it with the clock paused."""

    def __init__(self, core: EngineCore, executor: VirtualNodeExecutor) -> None:
        scheduler = core.scheduler
        assert isinstance(scheduler, Scheduler), scheduler
        self._pool = scheduler.kv_cache_manager.block_pool
        self._scheduler = scheduler if isinstance(scheduler, PipeMaxScheduler) else None
        self._executor = executor
        self._begin_s = executor.clock.now_s()
        self._num_gpu_blocks = self._pool.get_num_free_blocks()
        self._samples: list[KvSample] = []

    def sample(self) -> None:
        """Note how full the pools are now."""
        self._samples.append(
            KvSample(
                time_s=self._executor.clock.now_s() - self._begin_s,
                gpu=1 - self._pool.get_num_free_blocks() / self._num_gpu_blocks,
                host=self._host_usage(),
            )
        )

    def _host_usage(self) -> float:
        if self._scheduler is None:
            return 0.0
        pool = self._scheduler._host
        return 1 - pool.num_free / pool.num_blocks

    def kv(self) -> tuple[KvSample, ...]:
        """Return up to some hundreds of samples, each the mean of as many steps; the last may have fewer."""
        size = max(1, -(-len(self._samples) // _MOST_SAMPLES))
        groups = [self._samples[first : first + size] for first in range(0, len(self._samples), size)]
        return tuple(
            KvSample(
                time_s=group[-1].time_s,
                gpu=sum(one.gpu for one in group) / len(group),
                host=sum(one.host for one in group) / len(group),
            )
            for group in groups
        )

    def steady_part(self, tokens: int) -> SteadyPart:
        """Return the part up to now, in which ``tokens`` were computed."""
        node = self._executor.node
        seconds, usage = self._executor.clock.now_s() - self._begin_s, node.usage
        stages_s = seconds * node.num_stages
        return SteadyPart(
            seconds=seconds,
            tokens=tokens,
            prompts=usage.prompt_stage_s / stages_s,
            decode=usage.decode_stage_s / stages_s,
            mixed=usage.mixed_stage_s / stages_s,
            mean_decode_batch=usage.num_decoded / max(1, usage.num_decode_steps),
            host_bubble=usage.host_bubble_s / seconds,
            host_to_gpu=node.host_to_gpu_s / seconds,
        )
