"""Count what the scheduler does, and report it in vLLM's statistics, in the place of the KV connector's."""

from collections.abc import Collection
from dataclasses import asdict, dataclass

from pipemax.control.controller import Controller
from pipemax.domain.plan import Phase, PhaseReason, StepPlan
from pipemax.transfer.commands import CopyCounts
from pipemax.vllm_ext.worker.stage_reports import ReportBook


@dataclass(slots=True)
class Counters:
    """Counts since the engine's start, written by the scheduler as it carries out plans."""

    prefill_steps: int = 0
    decode_steps: int = 0
    empty_steps: int = 0
    decoded_tokens: int = 0
    evictions: int = 0
    overwrites: int = 0
    """Evictions in a wave, behind the computation."""
    recomputes: int = 0
    prefetches: int = 0
    prefetched_blocks: int = 0
    """Blocks copied."""
    found_blocks: int = 0
    """Blocks of prefetched requests that were still on the GPU, or shared with a resident one."""
    refused: int = 0
    schedule_s: float = 0.0
    """Time spent planning and scheduling."""

    batch_size: int = 0
    """Requests of the last step that ran any."""

    def count_run(self, plan: StepPlan, ran: Collection[str]) -> None:
        """Count a plan, of which the requests ``ran`` did. A mixed step with decodes counts as a decode step."""
        self.overwrites += len(plan.overwrite or ())
        self.evictions += len(plan.evict) + len(plan.overwrite or ())
        self.recomputes += len(plan.recompute)
        self.refused += len(plan.run) - len(ran)
        if not ran:
            self.empty_steps += 1
            return
        self.batch_size = len(ran)
        num_decodes = len(ran) if plan.phase is Phase.DECODE else 0
        if plan.num_decodes:
            num_decodes = sum(request_id in ran for request_id in plan.run[: plan.num_decodes])
        self.decoded_tokens += num_decodes
        if num_decodes:
            self.decode_steps += 1
        else:
            self.prefill_steps += 1

    def to_stats(self, controller: Controller, plan: StepPlan, reports: ReportBook) -> dict[str, float]:
        """Return the counts since the engine's start and the last plan's figures, by name."""
        decision, config = plan.decision, controller.config
        token_bytes = sum(stage.kv_bytes_per_token for stage in config.stages)  # on one rank of each
        block_bytes = config.block_tokens * token_bytes * reports.ranks_per_stage
        error = max(controller.times.decode_error(), key=lambda error: error.mean)
        values: dict[str, float] = {
            **asdict(self),
            "phase_switches": controller.num_switches,
            "is_decode_phase": int(controller.phase is Phase.DECODE),
            "is_mixed_batching": int(controller.phase is Phase.MIXED),
            "is_steady": int(controller.is_steady),
            "prefetch_stall_s": max(reports.stall_s),
            **asdict(sum(reports.copies, CopyCounts())),
            "measured_step_s": controller.times.last_step_s,
            "prefetched_bytes": self.prefetched_blocks * block_bytes,
            "budget_bytes": decision.budget_blocks * block_bytes,
            "host_kv_usage": 1 - decision.free_host_blocks / config.host_blocks,
            "gpu_kv_usage": 1 - max(0, decision.free_gpu_blocks) / config.gpu_blocks,
            "awaits_input": int(decision.reason is PhaseReason.AWAIT_INPUT),
            "predicted_step_s": controller.times.last_predicted_s,
            "is_calibrated": int(controller.times.is_calibrated),
            "budget_blocks": decision.budget_blocks,
            "waiting_requests": decision.num_waiting,
            "parked_requests": decision.num_parked,
            "resident_requests": decision.num_resident,
            "free_gpu_blocks": decision.free_gpu_blocks,
            "free_host_blocks": decision.free_host_blocks,
            "live_blocks": decision.live_blocks,
            "steps_within_5_percent": error.within_5_percent,
            "worst_step_error": error.worst,
            "mean_step_error": error.mean,
        }
        return {name: float(value) for name, value in values.items()}


def demand_stats(controller: Controller, *, num_known: int, num_blocked: int) -> dict[str, float]:
    """Return how much further input there is room for.

    ``num_known`` requests have ever been taken in. ``num_blocked`` of them wait for their grammar, unknown to the
    controller. The caller must still subtract the requests sent since.
    """
    mean_tokens = controller.kv_tokens_per_request
    return {
        "admission_demand_tokens": controller.admission_demand_tokens - num_blocked * (mean_tokens or 0.0),
        "kv_tokens_per_request": mean_tokens or 0.0,
        "known_requests": float(num_known),
    }
