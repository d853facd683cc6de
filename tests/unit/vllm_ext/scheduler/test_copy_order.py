"""The real scheduler's copies on a recording device: its store fences suffice, whatever it evicts and brings back."""

from random import Random
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from pipemax.control.controller_config import StageConfig
from pipemax.domain.plain_values import encode
from pipemax.domain.step_times import StepTimeModel
from pipemax.transfer.cuda.device import Fence, Lane, Pool
from pipemax.transfer.cuda.transfers import CudaTransfers
from pipemax.vllm_ext.worker.connector import StepMetadata
from tests.fakes.kv_stage import GROUPED, TINY, fake_token_store, token_spans
from tests.fakes.recording_device import FakeKernel, RecordingDevice
from tests.unit.vllm_ext.fake_worker import (
    BLOCK_TOKENS,
    FakeCore,
    FakeWorker,
    expected_output,
    make_request,
    make_scheduler,
)

GPU_BLOCKS, HOST_BLOCKS = 24, 120


class RecordedWorker(FakeWorker):
    """Checks what is read as its parent does, and in which order it may be read."""

    def __init__(
        self,
        rng: Random,
        dropped: Fence | None = None,
        num_slots: int | None = None,
        stages: int = 1,
        *,
        num_groups: int = 0,
    ) -> None:
        """``num_groups``: of layers, in which steps compute; 0 without waves."""
        super().__init__(num_slots, stages)
        self._layout = layout = GROUPED if num_groups else TINY
        self._groups = layout.layer_groups(num_groups) if num_groups else ()
        block_bytes = layout.block_bytes
        self.device = RecordingDevice(
            gpu_blocks=GPU_BLOCKS + 1, host_blocks=HOST_BLOCKS, block_bytes=block_bytes, dropped=dropped
        )
        self._transfers = CudaTransfers(
            self.device,
            block_bytes=block_bytes,
            make_token_store=fake_token_store(self.device, layout),
            groups=layout.group_spans(num_groups) if num_groups else (),
        )
        self._rng = rng

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        assert isinstance(output.kv_connector_metadata, StepMetadata)
        copies = output.kv_connector_metadata.copies
        self._transfers.begin_step(copies)
        self._transfers.start_prefetches(copies)
        result = super().execute(output)
        if copies.in_groups:
            for group, layers in enumerate(self._groups):
                self._transfers.begin_group(group)
                self._launch(output, slice(layers.start, layers.stop))
                self._transfers.end_group(copies, group)
        else:
            self._launch(output)
        self._transfers.end_step(copies)
        for _ in range(self._rng.randint(0, 6)):
            self.device.advance(self._rng.choice(list(Lane)))
        return result

    def _launch(self, output: SchedulerOutput, layers: slice = slice(None)) -> None:
        for name, count in output.num_scheduled_tokens.items():
            computed, (table,) = self.computed[name], self.tables[name]
            places = [
                (table[token // BLOCK_TOKENS], token % BLOCK_TOKENS) for token in range(computed + count)
            ]
            reads, writes = (
                token_spans(Pool.GPU, self._layout, part, layers)
                for part in (places[:computed], places[computed:])
            )
            self.device.launch(Lane.COMPUTE, FakeKernel(reads, writes, lambda: None))


def run(
    seed: int,
    *,
    stores_tokens: bool,
    runner: int = 1,
    dropped: Fence | None = None,
    is_slow: bool = False,
    **controller: Any,
) -> FakeCore:
    """With the V2 runner also asynchronously: what is the default on GPUs.

    ``is_slow``: while a step runs, two blocks can be prefetched.
    """
    rng = Random(seed)
    stages = rng.randint(1, 3)
    scheduler = make_scheduler(
        gpu_blocks=GPU_BLOCKS,
        host_blocks=HOST_BLOCKS,
        num_batches=rng.randint(2, 4),
        stages=stages,
        stores_tokens=stores_tokens,
        runner=runner,
        asynchronous=runner == 2,
        **controller,
    )
    if is_slow:
        times = StepTimeModel.linear(alpha_s=0, beta_s=0, delta_s=1.0)
        slow = StageConfig(
            kv_bytes_per_token=1000,
            h2d_bytes_per_s=2.5 * 1000 * BLOCK_TOKENS,
            decode_time=times,
            prefill_time=times,
        )
        scheduler.recalibrate([encode(slow)] * stages)
    core = FakeCore(scheduler, depth=stages if runner == 1 else stages + 1)
    num_slots = None if runner == 1 else scheduler.max_num_running_reqs
    num_groups = controller.get("wave_groups", 0)
    core.worker = RecordedWorker(rng, dropped, num_slots, stages, num_groups=num_groups)
    template = [rng.randrange(1000) for _ in range(13)]
    expected: dict[str, list[int]] = {}
    for index in range(40):
        prompt = template[: rng.choice([0, 8, 13])] + [rng.randrange(1000) for _ in range(rng.randint(1, 24))]
        expected[str(index)] = expected_output(prompt, max_tokens := rng.randint(1, 16))
        core.add(make_request(str(index), prompt, max_tokens))
        if rng.random() < 0.2:
            core.abort([str(index)])
            del expected[str(index)]
    outputs = core.run()
    assert {name: outputs[name] for name in expected} == expected
    assert core.counters.prefetches > 0
    return core


@pytest.mark.parametrize("stores_tokens", [False, True], ids=["blocks", "tokens"])
@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_no_step_of_the_scheduler_races_with_copies(seed: int, runner: int, stores_tokens: bool) -> None:
    core = run(seed, stores_tokens=stores_tokens, runner=runner)
    assert core.worker.device.races == []
    saved = (Lane.STORE, Fence.SAVE_AFTER_COMPUTE) in core.worker.device.waits
    assert saved is not stores_tokens, "an eviction copies nothing where tokens are stored"


def test_steps_without_their_store_fences_have_races() -> None:
    assert any(
        run(seed, stores_tokens=seed % 2 == 0, dropped=Fence.COMPUTE_AFTER_STORE).worker.device.races
        for seed in range(8)
    )


@pytest.mark.parametrize("runner", [1, 2])
def test_prefetches_in_parts_are_needed_later_and_nobody_touches_them_before(runner: int) -> None:
    """A budget of two blocks: many a request comes back over several steps, and some end in the midst of that."""
    num_abandoned = 0
    for seed in (4, 8):
        core = run(seed, stores_tokens=True, runner=runner, is_slow=True, overdue_iterations=2)
        assert core.worker.device.races == []
        assert core.worker.num_later_prefetches > 50
        num_abandoned += core.worker.num_abandoned
    assert num_abandoned > 0


@pytest.mark.parametrize("stores_tokens", [False, True], ids=["blocks", "tokens"])
@pytest.mark.parametrize("runner", [1, 2])
def test_no_step_races_with_the_copies_of_a_wave(runner: int, stores_tokens: bool) -> None:
    core = run(3, stores_tokens=stores_tokens, runner=runner, wave_groups=2)
    assert core.worker.num_wave_prefetches > 20
    assert core.worker.device.races == []


@pytest.mark.parametrize("fence", [Fence.WAVE_AFTER_GROUP, Fence.GROUP_AFTER_WAVE])
def test_waves_without_their_fences_have_races(fence: Fence) -> None:
    assert any(
        run(seed, stores_tokens=True, dropped=fence, wave_groups=2).worker.device.races for seed in range(4)
    )
