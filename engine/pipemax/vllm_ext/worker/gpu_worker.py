"""A stage's worker on a GPU: it times each step by the device's clock.

vLLM's own worker does the rest. Its hooks run before and after the forward pass, never between layers, so full CUDA
graphs remain possible.
"""

from typing import TYPE_CHECKING, cast

from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from pipemax.vllm_ext.runtime_settings import RuntimeSettings
from pipemax.vllm_ext.seam.runner_patches import (
    limited,
    patch_v2_runner,
    profile_one_step,
    watch_received,
)
from pipemax.vllm_ext.seam.vllm_types import (
    AsyncModelRunnerOutput,
    GrammarOutput,
    ModelRunnerOutput,
    SchedulerOutput,
    get_kv_transfer_group,
    get_pp_group,
    has_kv_transfer_group,
)
from pipemax.vllm_ext.worker.connector import PipeMaxConnector
from pipemax.vllm_ext.worker.copy_calls import AnswersCopyCalls
from pipemax.vllm_ext.worker.stage_clock import GpuStageClock
from pipemax.vllm_ext.worker.whole_windows import KeepsWholeWindows

if TYPE_CHECKING:  # seconds to import, and each worker needs one of them
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2


class PipeMaxGpuWorker(KeepsWholeWindows, AnswersCopyCalls, Worker):
    """A stage of a pipeline on a GPU under ``policy: pipemax``."""

    def init_device(self) -> None:
        super().init_device()
        watch_received(self.model_runner, _mark_received)
        if self.use_v2_model_runner:
            # vLLM annotates a worker's runner as the V1 runner, whichever it makes.
            runner = cast("GPUModelRunnerV2", self.model_runner)
            patch_v2_runner(runner)
            profile_one_step(runner, self._step_requests)

    @property
    def _step_requests(self) -> int:
        """Maximum of requests in one step."""
        transfer_config = self.vllm_config.kv_transfer_config
        assert transfer_config is not None, "policy pipemax runs with its connector"
        return RuntimeSettings.from_extra_config(transfer_config.kv_connector_extra_config).max_num_seqs

    def compile_or_warm_up_model(self) -> CompilationTimes:
        # vLLM warms the sampler up with a batch of this number, for whose logits no memory was set aside.
        with limited(self.scheduler_config, "max_num_seqs", self._step_requests):
            times: CompilationTimes = super().compile_or_warm_up_model()
            return times

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        output: ModelRunnerOutput | AsyncModelRunnerOutput | None = super().execute_model(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens > 0 and (clock := _gpu_clock()) is not None:
            clock.mark_computed()
        return output

    def sample_tokens(
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        output: ModelRunnerOutput | AsyncModelRunnerOutput = super().sample_tokens(grammar_output)
        # Other stages only wait for the tokens here.
        if get_pp_group().is_last_rank and (clock := _gpu_clock()) is not None:
            clock.mark_sampled()
        return output


def _mark_received() -> None:
    if (clock := _gpu_clock()) is not None:
        clock.mark_received()


def _gpu_clock() -> GpuStageClock | None:
    """Return this stage's clock, or ``None`` while the model is profiled and captured."""
    if not has_kv_transfer_group():
        return None
    connector = get_kv_transfer_group()
    assert isinstance(connector, PipeMaxConnector), connector
    return connector.gpu_clock
