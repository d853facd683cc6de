"""Take in the outputs of plain decodes as vLLM's ``update_from_output`` would, in a third of its time.

vLLM's loop looks for drafts, encoders, pooled outputs, transfers and much else at each request: some 6 µs. A plain
decode has one token, which ends nothing. Plain decodes are taken in here. vLLM's own loop takes in all others and
whatever else a step brings, so that it ends every request. A test compares what both return and leave behind.
"""

from dataclasses import replace

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_sequence_repetition
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus


def can_update_decodes(scheduler: Scheduler) -> bool:
    """Return whether vLLM is set up with nothing that ``update_decodes`` leaves out."""
    return (
        scheduler.num_spec_tokens == 0
        and scheduler.aux_output_connector is None
        and not scheduler.return_sampling_mask
        and not (scheduler.perf_metrics and scheduler.perf_metrics.is_enabled())
    )


def update_decodes(
    scheduler: Scheduler, step: SchedulerOutput, worker_output: ModelRunnerOutput
) -> tuple[SchedulerOutput, list[EngineCoreOutput]]:
    """Take in the plain decodes of a step. Return the step without them, for vLLM, and their outputs."""
    if not _is_plain_step(worker_output):
        return step, []
    sampled, index_of = worker_output.sampled_token_ids, worker_output.req_id_to_index
    logprobs, requests = worker_output.logprobs, scheduler.requests
    hash_tokens, block_tokens = scheduler.hash_block_size, scheduler.block_size
    is_async = isinstance(scheduler, AsyncScheduler)
    left: dict[str, int] = {}
    outputs: list[EngineCoreOutput] = []
    for request_id, num_tokens in step.num_scheduled_tokens.items():
        request = requests.get(request_id)
        index = index_of[request_id]
        tokens = sampled[index]
        if (
            request is None
            or num_tokens != 1
            or len(tokens) != 1
            or not _is_plain(request)
            or _ends(scheduler, request, tokens[0])
        ):
            left[request_id] = num_tokens
            continue
        request.num_in_flight_tokens -= 1
        request._output_token_ids.append(tokens[0])
        all_tokens = request._all_token_ids
        all_tokens.append(tokens[0])
        if len(all_tokens) % hash_tokens == 0:
            request.update_block_hashes()
        if is_async:
            request.num_output_placeholders -= 1
            num_known = request.num_computed_tokens - request.num_output_placeholders
            if num_known % block_tokens == 0:
                scheduler.kv_cache_manager.cache_blocks(request, num_known)
        output = EngineCoreOutput(request_id, tokens)
        if logprobs and request.sampling_params.num_logprobs is not None:  # type: ignore[union-attr]
            output.new_logprobs = logprobs.slice_request(index, 1)
        outputs.append(output)
    return replace(step, num_scheduled_tokens=left), outputs


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


def _is_plain(request: Request) -> bool:
    """Return whether vLLM's loop would do nothing for a request but count its token, unless that ends it."""
    return (
        request.status is RequestStatus.RUNNING
        and request.structured_output_request is None
        and request.prefill_stats is None
        and request.client_index == 0
        and not (
            request.mm_features
            or request.events
            or request.trace_headers
            or request.num_stale_output_tokens
            or request.num_nans_in_logits
        )
    )


def _ends(scheduler: Scheduler, request: Request, token: int) -> bool:
    """Return whether vLLM's ``check_stop`` may end a request with this token, which it does not have yet."""
    params = request.sampling_params
    return (
        params is None
        or token == params.eos_token_id
        or token in (params.stop_token_ids or ())
        or len(request._all_token_ids) + 1 >= scheduler.max_model_len
        or len(request._output_token_ids) + 1 >= request.max_tokens
        or (params.repetition_detection is not None and _repeats(request, token))
    )


def _repeats(request: Request, token: int) -> bool:
    """Return whether the outputs with this token end in a pattern that the request forbids."""
    assert request.sampling_params is not None
    assert request.sampling_params.repetition_detection is not None
    tokens = [*request._output_token_ids, token]
    return check_sequence_repetition(tokens, request.sampling_params.repetition_detection)
