"""Workers on a CPU: pipeline stages, block-first KV, and the measured time of each step.

vLLM runs only one stage on a CPU, and this module fixes two things. vLLM's V1 runner makes the buffers for another
stage's activations in a warm-up that CPUs skip; and a seeded request whose prompt is computed in chunks ends the
engine, because generators on a CPU cannot be rewound. ``seam.cpu_attention`` fixes the attention's.
"""

import time
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from pipemax.vllm_ext.seam.cpu_attention import declare_block_first, write_between_blocks
from pipemax.vllm_ext.seam.runner_patches import patch_v2_runner
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
from pipemax.vllm_ext.worker.whole_windows import KeepsWholeWindows

if TYPE_CHECKING:  # seconds to import
    from vllm.model_executor.models.interfaces import SupportsPP
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2


declare_block_first()


class _SpareGenerator(torch.Generator):
    """Draws for samples that are thrown away, in place of a generator that would have to be rewound."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        return self


class CpuStageWorker(CPUWorker):
    """A stage of a pipeline on a CPU, under either policy."""

    def determine_available_memory(self) -> int:
        available: int = super().determine_available_memory()
        runner = self.model_runner
        if not get_pp_group().is_first_rank and getattr(runner, "intermediate_tensors", 0) is None:
            # A model that is split into stages has the method; torch knows it as an nn.Module.
            model = cast("SupportsPP", runner.model)
            dtype = cast(torch.dtype, runner.model_config.dtype)  # a name only until vLLM has made the config
            runner.intermediate_tensors = model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=dtype, device=runner.device
            )
        return available

    def sample_tokens(
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        runner = self.model_runner
        if self.use_v2_model_runner:
            sampled: ModelRunnerOutput | AsyncModelRunnerOutput = super().sample_tokens(grammar_output)
            return sampled
        batch = runner.input_batch
        cut_prompts = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0]
        kept = {row: batch.generators[row] for row in cut_prompts.tolist() if row in batch.generators}
        batch.generators.update({row: _SpareGenerator() for row in kept})
        output: ModelRunnerOutput | AsyncModelRunnerOutput = super().sample_tokens(grammar_output)
        batch.generators.update(kept)
        return output


class PipeMaxCpuWorker(KeepsWholeWindows, AnswersCopyCalls, CpuStageWorker):
    """A stage on a CPU under ``policy: pipemax``. Measures each step, from which the controller learns."""

    def init_device(self) -> None:
        super().init_device()  # type: ignore[no-untyped-call]  # vLLM lacks the types
        if self.model_config.use_mla:
            write_between_blocks()
        if self.use_v2_model_runner:
            # vLLM annotates a worker's runner as the V1 runner, whichever it makes.
            runner = cast("GPUModelRunnerV2", self.model_runner)
            patch_v2_runner(runner)

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        output: ModelRunnerOutput | AsyncModelRunnerOutput | None = super().execute_model(scheduler_output)
        connector = _connector()
        if connector is not None and scheduler_output.total_num_scheduled_tokens > 0:
            connector.add_compute_s(time.perf_counter() - connector.step_begin_s)
        return output

    def sample_tokens(
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        begin_s = time.perf_counter()
        output = super().sample_tokens(grammar_output)
        connector = _connector()
        if connector is not None:
            connector.add_compute_s(time.perf_counter() - begin_s)
        return output


def _connector() -> PipeMaxConnector | None:
    if not has_kv_transfer_group():
        return None
    connector = get_kv_transfer_group()
    assert isinstance(connector, PipeMaxConnector), connector
    return connector
