"""Measure the cost of deciding: the time of ``Controller.plan_step`` in decode, by the number of requests on the host.

    python lab/bench/plan_step.py [--batching separated|mixed] [--json FILE] [--steps N] [--requests N ...]

Eight stages, LLaMA-2-70B's KV on 8 × RTX 5090 (17,753 blocks), ShareGPT-like lengths, eight steps in flight. The
host pool is made large enough for all requests, whose prompts are prefilled first and not timed. Under mixed batching,
steps of up to 256 tokens decode and take prompts. They are timed once the controller begins no further prompt for the
first time, so most of the requests wait and few are on the host.
``apply_median_ms`` is the time to apply a step's events; the other columns are ``plan_step`` only: by the wall clock,
and in CPU time of the thread (``cpu_``), which other processes of a shared machine do not lengthen.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from pipemax.control.controller import Controller
from pipemax.control.controller_config import ControllerConfig, StageConfig
from pipemax.domain.events import Event, RequestAdmitted, StepCompleted
from pipemax.domain.plan import Batching, Phase, PhaseReason, StepPlan
from pipemax.domain.request import RequestSpec
from pipemax.domain.step_times import StepTimeModel
from pipemax.domain.units import RequestId

NUM_STAGES = 8
STEPS_IN_FLIGHT = 8
MIXED_STEP_TOKENS = 256
SIZES = (1_000, 10_000, 100_000, 1_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The figures of one size; times are of ``plan_step`` unless named otherwise."""

    requests: int
    median_ms: float
    p99_ms: float
    max_ms: float
    cpu_median_ms: float
    cpu_p99_ms: float
    apply_median_ms: float
    mean_batch: float
    mean_prefetched: float
    warm_up_median_ms: float | None
    steady_median_ms: float | None


class Driver:
    """Carries out plans at once and reports to the controller; requests end at lengths drawn beforehand."""

    def __init__(self, num_requests: int, seed: int, batching: Batching) -> None:
        rng = np.random.default_rng(seed)
        prompts = np.clip(rng.lognormal(4.997, 1.298, num_requests), 1, 3500).astype(int)
        outputs = np.clip(rng.lognormal(5.024, 0.943, num_requests), 1, 500).astype(int)
        self._left = {RequestId(f"r{i}"): int(tokens) for i, tokens in enumerate(outputs)}
        blocks = int(np.sum((prompts + outputs) // 16 + 1))
        self.controller = Controller(_config(host_blocks=int(blocks / 0.9), batching=batching))
        self._in_flight: deque[StepPlan] = deque()
        self._waits = False
        self.controller.apply(
            [
                RequestAdmitted(
                    request=RequestSpec(
                        request_id=RequestId(f"r{i}"),
                        prompt_tokens=int(prompts[i]),
                        max_tokens=502,
                        expected_output_tokens=int(outputs[i]),
                    )
                )
                for i in range(num_requests)
            ]
        )

    def take_in(self) -> float:
        """Complete the oldest step if enough are in flight or the controller waits; return the seconds in ``apply``."""
        if not self._in_flight or (len(self._in_flight) < STEPS_IN_FLIGHT and not self._waits):
            return 0.0
        plan = self._in_flight.popleft()
        finished: tuple[RequestId, ...] = ()
        if decoding := plan.run[: _num_decodes(plan)]:
            for request_id in decoding:
                self._left[request_id] -= 1
            finished = tuple(request_id for request_id in decoding if self._left[request_id] == 0)
        events: list[Event] = [StepCompleted(step_id=plan.step_id, finished=finished)]
        started = time.perf_counter()
        self.controller.apply(events)
        return time.perf_counter() - started

    def plan(self) -> tuple[StepPlan, float, float]:
        """Plan a step; return the plan, and its seconds by the wall clock and in CPU time."""
        started, cpu_started = time.perf_counter(), time.thread_time()
        plan = self.controller.plan_step(0.0)
        cpu_s = time.thread_time() - cpu_started
        wall_s = time.perf_counter() - started
        if plan.run:
            self._in_flight.append(plan)
        self._waits = plan.is_empty
        return plan, wall_s, cpu_s


def _num_decodes(plan: StepPlan) -> int:
    """Return how many requests of the plan decode: the first ones of ``run``."""
    match plan.phase:
        case Phase.PREFILL:
            return 0
        case Phase.DECODE:
            return len(plan.run)
        case Phase.MIXED:
            return plan.num_decodes or 0


def _config(host_blocks: int, batching: Batching) -> ControllerConfig:
    stage = StageConfig(
        kv_bytes_per_token=40_960,
        h2d_bytes_per_s=42e9,
        decode_time=StepTimeModel.linear(alpha_s=7e-5, beta_s=2.7e-8, delta_s=0.0115),
        prefill_time=StepTimeModel.linear(alpha_s=2.2e-5, beta_s=5e-10, delta_s=0.002),
    )
    return ControllerConfig(
        num_batches=NUM_STAGES,
        stages=(stage,) * NUM_STAGES,
        gpu_blocks=17_753,
        host_blocks=host_blocks,
        # Prompts are not timed: large steps complete them soon.
        prefill_chunk_tokens=65_536,
        batching=batching,
        mixed_step_tokens=MIXED_STEP_TOKENS,
    )


def _warm_up(driver: Driver, batching: Batching) -> None:
    """Run until the controller decodes, or, under mixed batching, until it begins no further prompt."""
    while True:
        driver.take_in()
        plan, _, _ = driver.plan()
        controller = driver.controller
        if batching is Batching.MIXED:
            decision = plan.decision
            if decision.reason is PhaseReason.ENOUGH_PARKED or (plan.run and not decision.num_waiting):
                return
        elif controller.phase is Phase.DECODE and controller.num_switches:
            return


def measure(num_requests: int, num_steps: int, batching: Batching = Batching.SEPARATED) -> Row:
    driver = Driver(num_requests, seed=0, batching=batching)
    _warm_up(driver, batching)
    # A serving process does this once it is up: the requests are not garbage, and each collection would scan them all.
    gc.collect()
    gc.freeze()
    plan_s: list[float] = []
    cpu_s: list[float] = []
    apply_s: list[float] = []
    plans: list[StepPlan] = []
    while len(plans) < num_steps and driver.controller.num_unfinished:
        apply_s.append(driver.take_in())
        plan, wall, cpu = driver.plan()
        if _num_decodes(plan):
            plans.append(plan)
            plan_s.append(wall)
            cpu_s.append(cpu)
    gc.unfreeze()
    by_mode = {
        mode: [s for plan, s in zip(plans, plan_s, strict=True) if plan.decision.prefetch_mode == mode]
        for mode in ("warm_up", "steady")
    }
    return Row(
        requests=num_requests,
        median_ms=_median_ms(plan_s) or 0.0,
        p99_ms=float(np.percentile(plan_s, 99)) * 1e3,
        max_ms=max(plan_s) * 1e3,
        cpu_median_ms=_median_ms(cpu_s) or 0.0,
        cpu_p99_ms=float(np.percentile(cpu_s, 99)) * 1e3,
        apply_median_ms=_median_ms(apply_s) or 0.0,
        mean_batch=statistics.fmean(len(plan.run) for plan in plans),
        mean_prefetched=statistics.fmean(len(plan.prefetch) for plan in plans),
        warm_up_median_ms=_median_ms(by_mode["warm_up"]),
        steady_median_ms=_median_ms(by_mode["steady"]),
    )


def _median_ms(seconds: list[float]) -> float | None:
    return statistics.median(seconds) * 1e3 if seconds else None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the rows as JSON")
    parser.add_argument("--steps", type=int, default=4000, help="decode steps timed (default 4000)")
    parser.add_argument("--batching", type=Batching, choices=list(Batching), default=Batching.SEPARATED)
    parser.add_argument("--requests", type=int, nargs="+", default=list(SIZES))
    arguments = parser.parse_args()
    rows = []
    for num_requests in arguments.requests:
        row = measure(num_requests, arguments.steps, arguments.batching)
        rows.append(row)
        print(
            f"{row.requests:>9,} requests: median {row.median_ms:.3f} ms, p99 {row.p99_ms:.3f}, "
            f"max {row.max_ms:.3f}; CPU median {row.cpu_median_ms:.3f}, p99 {row.cpu_p99_ms:.3f}; "
            f"apply {row.apply_median_ms:.3f}; {row.mean_batch:.0f} run, {row.mean_prefetched:.0f} prefetched",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(
            json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
