"""The one-stage-of-eight experiment: a stage, its policies, and the outcome of each."""

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch

from bench.stage.driver import DecodeStep, Run, StageDriver
from bench.stage.model import LlamaStage
from bench.stage.pools import PoolPlan, stage_layout
from bench.stage.profile import measure_h2d, profile_decode, random_batch
from bench.stage.transfers import stage_transfers
from pipemax.control.controller import Controller
from pipemax.control.controller_config import ControllerConfig, StageConfig
from pipemax.control.times.estimator import ProfileRow, fit_step_time
from pipemax.domain.specs import KvLayout, ModelSpec
from pipemax.domain.step_times import StepTimeModel
from pipemax.sim.workloads import Workload
from pipemax.transfer.backend import StepTransfers

OpenTransfers = AbstractContextManager[tuple[StepTransfers, torch.Tensor | None]]

POLICIES = (
    "pipemax",
    "static_5",
    "static_10",
    "static_15",
    "static_20",
    "static_25",
    "none",
    "layer_first",
)
"""``none`` is PipeMax without a host pool, like TD-Pipe: what fits on the GPU is prefilled, then decoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One stage and how long it runs under each policy."""

    model: ModelSpec
    num_layers: int
    num_stages: int
    device: torch.device
    dtype: torch.dtype
    gpu_blocks: int
    host_blocks: int
    block_tokens: int = 16
    decode_steps: int = 400
    """Decode steps of each policy; all are run, those after ``warm_up_steps`` are counted."""
    warm_up_steps: int = 100
    profile_batches: tuple[int, ...] = (1, 32, 64, 128, 129, 192, 256, 257, 320, 384, 512, 768, 1024)
    profile_contexts: tuple[int, ...] = (64, 512, 2048)
    profile_repeats: int = 3
    computes_prefill: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.warm_up_steps < self.decode_steps:
            raise ValueError(
                f"warm_up_steps {self.warm_up_steps} must be below decode_steps {self.decode_steps}"
            )
        if self.host_blocks < self.gpu_blocks:
            raise ValueError(f"{self.host_blocks} host blocks are fewer than {self.gpu_blocks} GPU blocks")

    def pools(self, layout: KvLayout) -> PoolPlan:
        return PoolPlan(
            layout=layout,
            block=stage_layout(self.model, self.num_layers, self.block_tokens, self.dtype),
            gpu_blocks=self.gpu_blocks,
            host_blocks=self.host_blocks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One policy's figures over its counted decode steps."""

    policy: str
    steps: int
    mean_batch: float
    step_ms: float
    """Time of a step from begin to begin, with stalls."""
    compute_ms: float
    host_ms: float
    """Python's part of a step. If it exceeds ``step_ms``, it is what is measured."""
    tokens_per_s: float
    """Tokens per second of a balanced pipeline of such stages."""
    prefetched_blocks: float
    """Mean blocks per step."""
    stall_share: float
    h2d_gb_per_s: float
    within_5_percent: float
    """Share of the counted steps whose predicted time was within 5 %."""
    worst_error: float
    most_batch: int
    least_free_gpu_blocks: int


def controller_config(
    setup: Setup, policy: str, stage: StageConfig, mean_output_tokens: int
) -> ControllerConfig:
    """Return the config of a controller that sees one stage, with ``num_stages`` batches in rotation."""
    static = int(policy.removeprefix("static_")) / 100 if policy.startswith("static_") else None
    return ControllerConfig(
        num_batches=setup.num_stages,
        stages=(stage,),
        gpu_blocks=setup.gpu_blocks,
        host_blocks=setup.gpu_blocks if policy == "none" else setup.host_blocks,
        block_tokens=setup.block_tokens,
        max_num_seqs=4096,
        max_resident_requests=65536,
        initial_output_tokens=mean_output_tokens,
        static_prefetch_fraction=static,
    )


class Experiment:
    """The stage's weights and profile, shared by all policies."""

    def __init__(self, setup: Setup, workload: Workload, seed: int = 0) -> None:
        self.setup = setup
        self.workload = workload
        self._rng = np.random.default_rng(seed)
        self._stage = LlamaStage(setup.model, setup.num_layers, setup.device, setup.dtype, seed)
        self.profile: list[ProfileRow] = []

    def run(self, policy: str) -> tuple[Outcome, Run, StageConfig]:
        """Run one policy. Raise ``ValueError`` for an unknown one."""
        if policy not in POLICIES:
            raise ValueError(f"no policy {policy!r}; there are {', '.join(POLICIES)}")
        setup = self.setup
        plan = setup.pools(KvLayout.LAYER_FIRST if policy == "layer_first" else KvLayout.BLOCK_FIRST)
        gpu_rows = self._fresh_gpu_pool(plan)
        kv = plan.layer_views(gpu_rows, setup.gpu_blocks, setup.dtype)
        if not self.profile:
            self.profile = profile_decode(
                self._stage,
                plan,
                kv,
                batches=setup.profile_batches,
                contexts=setup.profile_contexts,
                repeats=setup.profile_repeats,
                rng=self._rng,
            )
        with self.open_transfers(plan, gpu_rows) as (transfers, host_rows):
            stage = self._stage_config(plan, kv, transfers)
            config = controller_config(setup, policy, stage, self.workload.typical_output_tokens)
            driver = StageDriver(
                Controller(config),
                self.workload,
                self._stage,
                plan,
                gpu_rows,
                transfers,
                num_stages=setup.num_stages,
                computes_prefill=setup.computes_prefill,
                keeps_replica=policy != "none",
                stores_tokens=setup.device.type == "cuda",
            )
            self.prepare(gpu_rows)
            run = driver.drive(setup.decode_steps)
            self.check(driver, plan, gpu_rows, host_rows, transfers)
        return summarize(policy, run, setup, plan), run, stage

    def open_transfers(self, plan: PoolPlan, gpu_rows: torch.Tensor) -> OpenTransfers:
        """Open the real transfers; a test may override this to break them."""
        return stage_transfers(plan, gpu_rows)

    def prepare(self, gpu_rows: torch.Tensor) -> None:
        """Prepare the GPU pool before the first step; does nothing, for tests to override."""

    def check(
        self,
        driver: StageDriver,
        plan: PoolPlan,
        gpu_rows: torch.Tensor,
        host_rows: torch.Tensor | None,
        transfers: StepTransfers,
    ) -> None:
        """Check the run while both pools exist; does nothing, for tests to override."""

    def _fresh_gpu_pool(self, plan: PoolPlan) -> torch.Tensor:
        """Return a GPU pool of small random values: attention over all-zero pages would draw less power."""
        values = torch.empty(
            plan.gpu_parts, plan.part.block_bytes // self.setup.dtype.itemsize,
            dtype=self.setup.dtype, device=self.setup.device,
        )  # fmt: skip
        return values.normal_(0.0, 0.5).view(torch.uint8)

    def _stage_config(self, plan: PoolPlan, kv: list[torch.Tensor], transfers: StepTransfers) -> StageConfig:
        setup = self.setup
        size = max(row.size for row in self.profile if row.kv_tokens <= 1024 * row.size)
        batch = random_batch(
            plan, min(size, setup.gpu_blocks // 2), setup.block_tokens, setup.device, self._rng
        )
        rate = measure_h2d(
            self._stage,
            plan,
            kv,
            transfers,
            batch=batch,
            num_blocks=max(1, min(setup.gpu_blocks // 20, setup.host_blocks)),
            repeats=5,
            rng=self._rng,
        )
        return StageConfig(
            kv_bytes_per_token=plan.block.token_bytes,
            h2d_bytes_per_s=rate,
            decode_time=fit_step_time(self.profile),
            # Prompts are booked or few: their times decide nothing here.
            prefill_time=StepTimeModel.linear(alpha_s=1e-5, beta_s=0.0, delta_s=1e-3),
        )


def summarize(policy: str, run: Run, setup: Setup, plan: PoolPlan) -> Outcome:
    """Summarize the steps after the warm-up. Raise ``ValueError`` if there are none."""
    counted: list[DecodeStep] = run.steps[setup.warm_up_steps :]
    if not counted:
        raise ValueError(
            f"{policy}: the requests ended after {len(run.steps)} decode steps, before the warm-up of "
            f"{setup.warm_up_steps} was over: give more requests"
        )
    step_s = fmean(step.begin_to_begin_s for step in counted)
    compute_s = fmean(step.compute_s for step in counted)
    mean_batch = fmean(step.batch for step in counted)
    errors = [abs(step.compute_s / step.predicted_s - 1) for step in counted if step.predicted_s > 0]
    prefetched = [(blocks, seconds) for blocks, seconds in run.prefetches if seconds > 0]
    rate = (
        sum(b for b, _ in prefetched) * plan.block.block_bytes / sum(s for _, s in prefetched)
        if prefetched
        else 0.0
    )
    return Outcome(
        policy=policy,
        steps=len(counted),
        mean_batch=mean_batch,
        step_ms=step_s * 1e3,
        compute_ms=compute_s * 1e3,
        host_ms=fmean(step.host_s for step in counted) * 1e3,
        tokens_per_s=mean_batch / step_s,
        prefetched_blocks=fmean(step.prefetched_blocks for step in counted),
        stall_share=1 - compute_s / step_s,
        h2d_gb_per_s=rate / 1e9,
        within_5_percent=fmean(error <= 0.05 for error in errors) if errors else 0.0,
        worst_error=max(errors, default=0.0),
        most_batch=max(step.batch for step in counted),
        least_free_gpu_blocks=min(step.free_gpu_blocks for step in counted),
    )


def as_json(outcome: Outcome, run: Run) -> dict[str, Any]:
    """Return the figures and every decode step behind them."""
    return {**asdict(outcome), "decode_steps": [asdict(step) for step in run.steps]}
