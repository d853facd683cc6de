"""What an engine under PipeMax's controller knows of tokens: prompts computed, outputs made, requests finished.

It decides nothing. The controller never sees output lengths before they are reached, except for a running mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pipemax.domain.events import PrefixCacheHit, RequestAdmitted
from pipemax.domain.plan import Phase, StepPlan
from pipemax.domain.request import PrefixId, RequestSpec, SharedPrefix
from pipemax.domain.units import RequestId
from pipemax.sim.machine import BLOCK_TOKENS
from pipemax.sim.stage_times import StepWork
from pipemax.sim.systems.waiting_prompts import add_prefill
from pipemax.sim.workloads import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedStep:
    """What a step computes, and the requests for which it makes a token."""

    work: StepWork
    hits: tuple[PrefixCacheHit, ...]
    """What the engine found cached, to be reported before the next plan is asked for."""
    outputs: tuple[RequestId, ...]


class TokenBook:
    """Counts tokens per request, by the request's number in the workload."""

    def __init__(
        self,
        workload: Workload,
        window_tokens: int | None = None,
        *,
        block_tokens: int = BLOCK_TOKENS,
        shares_prefix: bool = True,
    ) -> None:
        self._block_tokens = block_tokens
        self._prompts = [int(tokens) for tokens in workload.prompt_tokens]
        self._outputs = [int(tokens) for tokens in workload.output_tokens]
        self._prefix_tokens = workload.shared_prefix_tokens if shares_prefix else 0
        self._prefix_is_on_gpu = False
        self._window_tokens = window_tokens
        self._made = [0] * len(workload)
        self._to_compute = list(self._prompts)  # by a prefill; more when it is repeated with the output
        self._kv = [0] * len(workload)
        self.recomputed_tokens = 0

    def admissions(self) -> list[RequestAdmitted]:
        """Return an admission for each request.

        ``max_tokens`` is what a careful user would set: the longest output of the table.
        """
        longest = max(self._outputs)
        prefix = None
        if self._prefix_tokens:
            prefix = SharedPrefix(prefix_id=PrefixId("template"), num_tokens=self._prefix_tokens)
        return [
            RequestAdmitted(
                request=RequestSpec(
                    request_id=RequestId(str(number)), prompt_tokens=tokens, max_tokens=longest, prefix=prefix
                )
            )
            for number, tokens in enumerate(self._prompts)
        ]

    def start(self, plan: StepPlan) -> StartedStep:
        """Start a plan's step: later steps see its tokens' KV."""
        match plan.phase:
            case Phase.DECODE:
                num_decodes = len(plan.run)
            case Phase.PREFILL:
                num_decodes = 0
            case Phase.MIXED:
                assert plan.num_decodes is not None, plan
                num_decodes = plan.num_decodes
        work = self._start_decodes(plan.run[:num_decodes])
        hits, outputs = list[PrefixCacheHit](), [*plan.run[:num_decodes]]
        for request, planned in zip(plan.run[num_decodes:], plan.run_tokens[num_decodes:], strict=True):
            number = int(request)
            if self._kv[number] == 0:
                self._to_compute[number] = self._prompts[number] + self._made[number]
                self._kv[number] = self._cached_tokens()
                if self._kv[number]:
                    hits.append(
                        PrefixCacheHit(step_id=plan.step_id, request_id=request, num_tokens=self._kv[number])
                    )
            first = self._kv[number]
            tokens = min(planned, self._to_compute[number] - first)
            self._kv[number] += tokens
            # From its whole blocks on, the controller counts on it.
            self._prefix_is_on_gpu |= (
                self._kv[number] >= self._prefix_tokens // self._block_tokens * self._block_tokens
            )
            ends = first + tokens == self._to_compute[number]
            add_prefill(work, first, tokens, ends=ends, window_tokens=self._window_tokens)
            if ends:
                outputs.append(request)
        return StartedStep(work=work, hits=tuple(hits), outputs=tuple(outputs))

    def _start_decodes(self, requests: Sequence[RequestId]) -> StepWork:
        kv, context_tokens, attended = self._kv, 0, None
        if self._window_tokens is not None:
            attended = sum(min(kv[int(request)], self._window_tokens) for request in requests)
        for number in map(int, requests):
            tokens = kv[number]
            context_tokens += tokens
            kv[number] = tokens + 1
        return StepWork(
            decode_requests=len(requests),
            decode_context_tokens=context_tokens,
            decode_window_tokens=attended,
        )

    def _cached_tokens(self) -> int:
        """Return a prompt's leading tokens on the GPU: the shared prefix, once steps that compute it are in flight."""
        return self._prefix_tokens if self._prefix_is_on_gpu else 0

    def complete(self, outputs: tuple[RequestId, ...]) -> tuple[RequestId, ...]:
        """Count a token for each request of ``outputs``; return those that ended with it."""
        made, totals, finished = self._made, self._outputs, list[RequestId]()
        for request in outputs:
            number = int(request)
            tokens = made[number] = made[number] + 1
            if tokens == totals[number]:
                finished.append(request)
        return tuple(finished)

    def kv_tokens(self, request: RequestId) -> int:
        """Return a request's KV tokens that steps have computed, or will have once those in flight have completed."""
        return self._kv[int(request)]

    def recompute(self, request: RequestId) -> int:
        """Drop a request's KV, and count its tokens as recomputed; return how many tokens are no longer done."""
        number = int(request)
        dropped = self._kv[number]
        self.recomputed_tokens += dropped
        self._kv[number] = 0
        # The token made last has no KV yet; it will be computed with the others.
        has_made = dropped > 0 and dropped >= self._to_compute[number]
        return dropped + 1 if has_made else dropped
