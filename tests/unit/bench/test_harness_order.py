"""The one-stage harness's own account of blocks gives the GPU's lanes the fences that they need.

Real controller, real ``CudaTransfers``, a recording device in the place of the GPU: no two conflicting accesses are
unordered, whatever the lanes do meanwhile; and a fence less would be missed.
"""

import random

import pytest
import torch

from bench.stage.driver import StageDriver
from bench.stage.experiment import controller_config
from bench.stage.model import DecodeBatch, PromptChunk
from bench.stage.pools import PoolPlan
from pipemax.control.controller import Controller
from pipemax.control.controller_config import StageConfig
from pipemax.domain.specs import KvLayout
from pipemax.domain.step_times import StepTimeModel
from pipemax.transfer.commands import StepCopies, StepWait
from pipemax.transfer.cuda.device import Fence, Lane, Pool
from pipemax.transfer.cuda.transfers import CudaTransfers
from tests.fakes.kv_stage import fake_token_store, token_spans
from tests.fakes.recording_device import FakeKernel, RecordingDevice
from tests.unit.bench.test_one_stage import SETUP, workload


class RecordedStage:
    """In the place of ``LlamaStage``: says which tokens a step reads and writes, in every layer."""

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, plan: PoolPlan, recorder: RecordingDevice) -> None:
        self._plan = plan
        self._recorder = recorder

    def hidden(self, num_tokens: int) -> torch.Tensor:
        return torch.zeros(num_tokens)

    def decode(self, hidden: torch.Tensor, _kv: list[torch.Tensor], batch: DecodeBatch) -> torch.Tensor:
        reads = []
        for table, length in zip(batch.tables.tolist(), batch.lengths.tolist(), strict=True):
            reads += self._tokens(table, length - 1)
        self._launch(reads, batch.places.blocks.tolist(), batch.places.slots.tolist())
        return hidden

    def prefill(self, hidden: torch.Tensor, _kv: list[torch.Tensor], chunk: PromptChunk) -> torch.Tensor:
        reads = self._tokens(chunk.table.tolist(), chunk.first_token)
        self._launch(reads, chunk.places.blocks.tolist(), chunk.places.slots.tolist())
        return hidden

    def _tokens(self, table: list[int], num_tokens: int) -> list[tuple[int, int]]:
        block_tokens = self._plan.block.block_tokens
        return [(table[token // block_tokens], token % block_tokens) for token in range(num_tokens)]

    def _launch(self, reads: list[tuple[int, int]], blocks: list[int], slots: list[int]) -> None:
        writes = list(zip(blocks, slots, strict=True))
        spans = [token_spans(Pool.GPU, self._plan.block, places) for places in (reads, writes)]
        self._recorder.launch(Lane.COMPUTE, FakeKernel(spans[0], spans[1], lambda: None))


class RestlessTransfers(CudaTransfers):
    """Between two calls the lanes go on, each as far as it likes."""

    def __init__(self, recorder: RecordingDevice, plan: PoolPlan, seed: int) -> None:
        self._recorder, self._rng = recorder, random.Random(seed)
        size = plan.part.block_bytes
        make = fake_token_store(recorder, plan.part)
        super().__init__(recorder, block_bytes=size, make_token_store=make)

    def begin_step(self, copies: StepCopies) -> StepWait:
        self._go_on()
        return super().begin_step(copies)

    def end_step(self, copies: StepCopies) -> None:
        self._go_on()
        super().end_step(copies)

    def _go_on(self) -> None:
        for _ in range(self._rng.randint(0, 40)):
            self._recorder.advance(self._rng.choice(list(Lane)))


def races(seed: int, dropped: Fence | None = None) -> list:
    plan = SETUP.pools(KvLayout.BLOCK_FIRST)
    recorder = RecordingDevice(
        gpu_blocks=plan.gpu_blocks,
        host_blocks=plan.host_blocks,
        block_bytes=plan.block.block_bytes,
        dropped=dropped,
    )
    stage_config = StageConfig(
        kv_bytes_per_token=plan.block.token_bytes,
        h2d_bytes_per_s=plan.block.block_bytes * 8 / 1e-2,
        decode_time=StepTimeModel.linear(alpha_s=1e-4, beta_s=1e-6, delta_s=1e-2),
        prefill_time=StepTimeModel.linear(alpha_s=1e-4, beta_s=0.0, delta_s=1e-2),
    )
    rows = torch.from_numpy(recorder.memory[Pool.GPU]).view(plan.part.pool_shape(plan.gpu_blocks))
    driver = StageDriver(
        Controller(controller_config(SETUP, "pipemax", stage_config, 20)),
        workload(100),
        RecordedStage(plan, recorder),
        plan,
        rows,
        RestlessTransfers(recorder, plan, seed),
        num_stages=SETUP.num_stages,
        computes_prefill=True,
    )
    run = driver.drive(80)
    assert sum(step.prefetched_blocks for step in run.steps) > 50
    return recorder.races


@pytest.mark.parametrize("seed", range(3))
def test_no_two_conflicting_accesses_are_unordered(seed: int) -> None:
    assert not races(seed)


@pytest.mark.parametrize(
    "fence",
    [
        Fence.COMPUTE_AFTER_PREFETCH,
        Fence.COMPUTE_AFTER_STORE,
        Fence.PREFETCH_AFTER_STORE,
        Fence.STORE_AFTER_COMPUTE,
    ],
)
def test_a_schedule_without_one_of_its_fences_has_a_race(fence: Fence) -> None:
    """Not PREFETCH_AFTER_COMPUTE: a decode step's token stores come after it, and prefetches wait for them."""
    assert races(0, dropped=fence)
