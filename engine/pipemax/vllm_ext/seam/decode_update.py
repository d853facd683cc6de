"""Take in the outputs of plain decodes as vLLM's ``update_from_output`` would, in a third of its time.

vLLM's loop looks for drafts, encoders, pooled outputs, transfers and much else at each request: some 6 µs. A plain
decode has one token, which ends nothing. Plain decodes are taken in here. vLLM's own loop takes in all others and
whatever else a step brings, so that it ends every request. A test compares what both return and leave behind.
"""

from dataclasses import replace
from typing import NamedTuple

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus


def can_update_decodes(scheduler: Scheduler) -> bool:
    """Return whether vLLM is set up with nothing that ``DecodeUpdates`` leaves out."""
    return (
        scheduler.num_spec_tokens == 0
        and scheduler.aux_output_connector is None
        and not scheduler.return_sampling_mask
        and not (scheduler.perf_metrics and scheduler.perf_metrics.is_enabled())
    )


class _Decoding(NamedTuple):
    """A request that decodes plainly, with what does not change until it is freed."""

    request: Request
    ends: frozenset[int]
    """Tokens that may end it."""
    max_tokens: int
    """At this many tokens, its prompt among them, it ends."""
    has_logprobs: bool


class DecodeUpdates:
    """Takes in plain decodes for one scheduler, and remembers its requests until they are forgotten."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._decoding: dict[str, _Decoding | None] = {}  # None for requests that vLLM's loop takes in

    def forget(self, request_id: str) -> None:
        """Forget a request that is freed, as another may have its id."""
        self._decoding.pop(request_id, None)

    def take_in(
        self, step: SchedulerOutput, worker_output: ModelRunnerOutput
    ) -> tuple[SchedulerOutput, list[EngineCoreOutput]]:
        """Take in the plain decodes of a step. Return the step without them, for vLLM, and their outputs."""
        if not _is_plain_step(worker_output):
            return step, []
        scheduler, known = self._scheduler, self._decoding
        sampled, index_of = worker_output.sampled_token_ids, worker_output.req_id_to_index
        logprobs = worker_output.logprobs
        hash_tokens, block_tokens = scheduler.hash_block_size, scheduler.block_size
        is_async = isinstance(scheduler, AsyncScheduler)
        left: dict[str, int] = {}
        outputs: list[EngineCoreOutput] = []
        running = RequestStatus.RUNNING
        # No calls for a request where that can be: there are hundreds in a step, and each call takes a tenth of it.
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            index = index_of[request_id]
            tokens = sampled[index]
            decoding = known[request_id] if request_id in known else self._look_at(request_id)
            if decoding is None or num_tokens != 1 or len(tokens) != 1:
                left[request_id] = num_tokens
                continue
            request, ends, max_tokens, has_logprobs = decoding
            token, all_tokens = tokens[0], request._all_token_ids
            # vLLM's loop would do nothing for it but count this token, which it does not have yet.
            if (
                token in ends
                or len(all_tokens) + 1 >= max_tokens
                or request.status is not running
                or request.prefill_stats is not None
                or request.events
                or request.num_stale_output_tokens
                or request.num_nans_in_logits
            ):
                left[request_id] = num_tokens
                continue
            request.num_in_flight_tokens -= 1
            request._output_token_ids.append(token)
            all_tokens.append(token)
            if len(all_tokens) % hash_tokens == 0:
                request.update_block_hashes()
            if is_async:
                request.num_output_placeholders -= 1
                num_known = request.num_computed_tokens - request.num_output_placeholders
                if num_known % block_tokens == 0:
                    scheduler.kv_cache_manager.cache_blocks(request, num_known)
            output = EngineCoreOutput(request_id, tokens)
            if logprobs and has_logprobs:
                output.new_logprobs = logprobs.slice_request(index, 1)
            outputs.append(output)
        return replace(step, num_scheduled_tokens=left), outputs

    def _look_at(self, request_id: str) -> _Decoding | None:
        """Return what does not change of a request; None if vLLM's loop takes in all its outputs, or it is gone."""
        request = self._scheduler.requests.get(request_id)
        if request is None:
            return None
        self._decoding[request_id] = decoding = _decoding(request, self._scheduler.max_model_len)
        return decoding


def with_decodes(
    outputs: dict[int, EngineCoreOutputs], decodes: list[EngineCoreOutput]
) -> dict[int, EngineCoreOutputs]:
    """Return what vLLM made of the rest of a step with the outputs of its plain decodes ahead."""
    if decodes:
        of_client = outputs.setdefault(0, EngineCoreOutputs())
        of_client.outputs = decodes + of_client.outputs
    return outputs


def _is_plain_step(worker_output: ModelRunnerOutput) -> bool:
    """Return whether a step brings nothing for its requests but tokens and their log probabilities."""
    transfers = worker_output.kv_connector_output
    return bool(
        worker_output.sampled_token_ids
        and not worker_output.pooler_output
        and not worker_output.prompt_logprobs_dict
        and not worker_output.prompt_token_id_logprobs_dict
        and worker_output.num_nans_in_logits is None
        and not (transfers and (transfers.failed_recving or transfers.invalid_block_ids))
    )


def _decoding(request: Request, max_model_len: int) -> _Decoding | None:
    """Return what does not change of a request; None if vLLM's loop takes in all its outputs."""
    params = request.sampling_params
    if (
        params is None
        or params.repetition_detection is not None
        or request.structured_output_request is not None
        or request.client_index != 0
        or request.mm_features
        or request.trace_headers
    ):
        return None
    ends = frozenset(params.stop_token_ids or ())
    return _Decoding(
        request=request,
        ends=ends if params.eos_token_id is None else ends | {params.eos_token_id},
        max_tokens=min(max_model_len, request.num_prompt_tokens + request.max_tokens),
        has_logprobs=params.num_logprobs is not None,
    )
