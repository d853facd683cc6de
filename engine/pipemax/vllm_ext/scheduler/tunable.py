"""Stock vLLM's two schedulers, with limits that may change between steps and a record of each step.

vLLM reads both limits at every step, so changing them is enough; no scheduling code is overridden. Other code
decides what the limits should be.
"""

import time
from typing import Any

from pipemax.domain.step_records import MOST_STEPS, StepLimits
from pipemax.vllm_ext.seam.core_client import answer_calls
from pipemax.vllm_ext.seam.repetition import use_faster_check
from pipemax.vllm_ext.seam.vllm_types import (
    AsyncScheduler,
    EngineCoreOutputs,
    ModelRunnerOutput,
    Scheduler,
    SchedulerOutput,
)


class StepRecorder:
    """Records steps as their outputs are taken in, while somebody takes the records.

    It begins with the first ``take``, and rests after so many steps that nobody took: a look at each row of a step is
    worth its time to a tuner only.
    """

    def __init__(self, most_steps: int = MOST_STEPS) -> None:
        self._steps: list[tuple[int | float | None, ...]] = []
        self._most_steps = most_steps
        self._is_on = False
        self._dropped = 0
        self._last_output_s: float | None = None

    def record(
        self, output: SchedulerOutput, *, running: int, waiting: int, now_s: float, goes_on: bool
    ) -> None:
        """Record the step of ``output``, whose results came at ``now_s``.

        ``goes_on`` tells whether requests are left after it: the engine then works until the next step's results.
        """
        if not self._is_on or not output.num_scheduled_tokens:
            return
        if len(self._steps) == self._most_steps:
            self._dropped, self._is_on, self._last_output_s = self._dropped + self._most_steps, False, None
            self._steps.clear()
            return
        decode_kv, num_drafts = _decodes(output)
        prompt_tokens = output.total_num_scheduled_tokens - len(decode_kv) - num_drafts
        preempted = len(output.preempted_req_ids or ())
        seconds = None if self._last_output_s is None else now_s - self._last_output_s
        self._last_output_s = now_s if goes_on else None
        self._steps.append(
            (prompt_tokens, len(decode_kv), sum(decode_kv), running, waiting, preempted, seconds)
        )

    def take(self) -> dict[str, Any]:
        """Return what was recorded since the last call, as ``StepRecords.from_plain`` reads it."""
        names = ("prompt_tokens", "decodes", "kv_tokens", "running", "waiting", "preempted", "seconds")
        columns = zip(*self._steps, strict=True) if self._steps else [()] * len(names)
        taken = {name: list(column) for name, column in zip(names, columns, strict=True)}
        dropped, self._dropped, self._is_on = self._dropped, 0, True
        self._steps.clear()
        return {**taken, "dropped": dropped}


def _decodes(output: SchedulerOutput) -> tuple[list[int], int]:
    """Return the KV tokens of each row that decodes in a step, and the number of their drafted tokens.

    A row decodes if it has outputs and computes one token, besides drafts. A preempted row that comes back computes
    its tokens again, which is work as for a prompt.
    """
    cached, scheduled = output.scheduled_cached_reqs, output.num_scheduled_tokens
    drafts, resumed = output.scheduled_spec_decode_tokens, cached.resumed_req_ids
    rows = zip(cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True)
    decode_kv = []
    num_drafts = 0
    for request_id, computed, outputs in rows:
        tokens, of_drafts = scheduled[request_id], len(drafts.get(request_id, ()))
        if outputs and tokens == 1 + of_drafts and request_id not in resumed:
            decode_kv.append(computed + tokens)
            num_drafts += of_drafts
    return decode_kv, num_drafts


class TunableScheduler(Scheduler):
    """Runs over vLLM's synchronous scheduler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        use_faster_check()
        self._most_limits = StepLimits(
            step_tokens=self.max_num_scheduled_tokens, running_rows=self.max_num_active_reqs
        )
        self._least_step_tokens = min(self._piece_tokens(), self._most_limits.step_tokens)
        self._recorder = StepRecorder()
        answer_calls()

    def _piece_tokens(self) -> int:
        """Return the tokens that a step must have room for, because some row computes as many at once or waits."""
        if not self.scheduler_config.enable_chunked_prefill or self.scheduler_config.disable_chunked_mm_input:
            return self._most_limits.step_tokens  # whole prompts, or whole images
        if self.need_mamba_block_aligned_split:
            return int(self.cache_config.block_size)
        return 1 + self.num_spec_tokens

    def most_limits(self) -> tuple[int, int]:
        """See ``core_calls.most_limits``."""
        return self._most_limits.step_tokens, self._most_limits.running_rows

    def set_limits(self, step_tokens: int, running_rows: int) -> None:
        """See ``core_calls.set_limits``."""
        limits = StepLimits(step_tokens=step_tokens, running_rows=running_rows)
        if limits.within(self._most_limits) != limits:
            raise ValueError(f"{limits} are above those of the engine's start, {self._most_limits}")
        self.max_num_scheduled_tokens = max(step_tokens, self._least_step_tokens)
        self.max_num_active_reqs = running_rows

    def take_step_records(self) -> dict[str, Any]:
        """See ``core_calls.ask_step_records``."""
        return {
            **self._recorder.take(),
            "outputs_so_far": [request.num_output_tokens for request in self.running],
        }

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        now_s = time.monotonic()
        running, waiting = self.get_request_counts()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._recorder.record(
            scheduler_output,
            running=running,
            waiting=waiting,
            now_s=now_s,
            goes_on=self.has_unfinished_requests(),
        )
        return outputs


class TunableAsyncScheduler(TunableScheduler, AsyncScheduler):
    """Runs over vLLM's asynchronous scheduler."""
