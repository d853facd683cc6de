"""A vLLM engine driven by one thread: requests come in through a queue, completions go out through another.

The submitting thread tokenizes, so that the engine's thread does nothing but step. vLLM's core runs in processes of
its own; when one dies, ``step`` raises, and the next ``poll`` raises that as EngineDiedError.
"""

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.inputs import tokens_input
from vllm.outputs import CompletionOutput, PoolingRequestOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.metrics.loggers import StatLoggerFactory

from pipemax.checkpoint.prompt_encoder import PromptEncoder
from pipemax.config import EngineConfig, Policy
from pipemax.domain.errors import EngineDiedError, EngineStartError
from pipemax.domain.plan import Batching
from pipemax.generation import Completion, EngineStats, GenerationRequest, RequestError, Sampling
from pipemax.sim.measured_engine import MeasuredEngine
from pipemax.vllm_ext.calibration.measure import calibrate_at_start
from pipemax.vllm_ext.core_calls import mix_batches, set_input_open, use_batching
from pipemax.vllm_ext.engine.admission import AdmissionBook
from pipemax.vllm_ext.engine.stat_logger import EngineLedger, StatLogger
from pipemax.vllm_ext.engine.step_watch import StepWatch
from pipemax.vllm_ext.engine.time_account import TimeAccount, TimePart
from pipemax.vllm_ext.launch.start import RunningVllm
from pipemax.vllm_ext.launch.vllm_config import admission_capacity_tokens
from pipemax.vllm_ext.node_check.run import check_at_start
from pipemax.wire import ErrorCode

_ENCODED_AT_ONCE = 512
"""Requests tokenized together: the engine begins with the first ones while the rest of a table are tokenized."""


@dataclass(frozen=True, slots=True)
class _Add:
    request_id: str
    token_ids: list[int]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class _Abort:
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Input:
    is_open: bool


@dataclass(frozen=True, slots=True)
class _UseBatching:
    batching: Batching
    mixed_step_tokens: int | None


@dataclass(frozen=True, slots=True)
class _MixBatches:
    step_tokens: int


class _Stop:
    pass


class RowWatch(Protocol):
    """Hears of each row, on the engine's thread: no call may take time."""

    def sent(self, request_id: str) -> None: ...

    def ended(self, completions: Sequence[Completion]) -> None: ...

    def aborted(self, request_ids: Sequence[str]) -> None: ...

    def close(self) -> None: ...


class VllmEngine:
    """Implements ``pipemax.api.Engine`` over vLLM, under either policy."""

    def __init__(self, config: EngineConfig) -> None:
        """Block until the model is loaded. ``EngineStartError`` says why it could not be."""
        self._ledger = EngineLedger(time=TimeAccount(time.monotonic()))
        self._vllm = self._load(config, lambda vllm_config, engine_index: StatLogger(self._ledger))
        self._engine, vllm_config = self._vllm.engine, self._vllm.vllm_config
        try:
            self.measured = self._measure(config)
            self._encoder = PromptEncoder(
                self._engine.renderer.tokenizer,
                chat=config.chat,
                max_model_len=vllm_config.model_config.max_model_len,
            )
        except EngineStartError:  # it failed the check, and says why
            self._vllm.close()
            raise
        except Exception as error:  # of any type and module, as vLLM's own are
            cause = self._vllm.cause_of(error)
            self._vllm.close()
            raise EngineStartError(
                f"model {config.model!r} was loaded and cannot be served: {cause}"
            ) from error
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self._hears_of_input = config.policy is Policy.PIPEMAX
        self._admission = AdmissionBook(admission_capacity_tokens(vllm_config))
        self._commands: queue.SimpleQueue[_Add | _Abort | _Input | _UseBatching | _MixBatches | _Stop] = (
            queue.SimpleQueue()
        )
        self._watch: RowWatch | None = None
        self._completions: queue.SimpleQueue[list[Completion] | EngineDiedError] = queue.SimpleQueue()
        self._died: EngineDiedError | None = None
        self._steps = StepWatch()
        self._thread = threading.Thread(target=self._run, name="engine-step", daemon=True)
        self._ledger.time.charge(time.monotonic(), {TimePart.START_UP: 1.0})
        self._ledger.admission = self._admission
        self._thread.start()

    # -- what a virtual node does in another way ---------------------------------------------------------------

    def _load(self, config: EngineConfig, stat_logger: StatLoggerFactory) -> RunningVllm:
        return RunningVllm.start(config, stat_loggers=[stat_logger])

    def _measure(self, config: EngineConfig) -> MeasuredEngine | None:
        """Check the loaded engine and measure it, as far as the config wants it."""
        check_at_start(self._engine, self._vllm.vllm_config, config)
        return calibrate_at_start(self._engine, self._vllm.vllm_config, config)

    def _sampling_params(self, token_ids: Sequence[int], sampling: Sampling) -> SamplingParams:
        """Return vLLM's parameters of a request with this prompt. ``ValueError`` becomes the row's error."""
        return _sampling_params(sampling)

    def _text(self, sequence: CompletionOutput) -> str:
        return sequence.text

    # -- any thread -------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for first in range(0, len(requests), _ENCODED_AT_ONCE):
            self._submit(requests[first : first + _ENCODED_AT_ONCE])

    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        refused: list[Completion] = []
        for request, encoded in zip(requests, self._encoder.encode(requests), strict=True):
            if isinstance(encoded, RequestError):
                refused.append(Completion(request_id=request.request_id, error=encoded))
                continue
            most_tokens = min(len(encoded) + request.sampling.max_tokens, self._max_model_len)
            self._admission.submit(request.request_id, most_tokens)
            self._commands.put(_Add(request.request_id, encoded, request.sampling))
        if refused:
            self._completions.put(refused)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._admission.end(request_ids)
        self._commands.put(_Abort(tuple(request_ids)))

    def set_input_open(self, is_open: bool) -> None:
        self._commands.put(_Input(is_open))

    def use_batching(self, batching: Batching, mixed_step_tokens: int | None) -> None:
        """Have an engine under PipeMax batch so from now on. Call this before the first request."""
        self._commands.put(_UseBatching(batching, mixed_step_tokens))

    def mix_batches(self, step_tokens: int) -> None:
        """Have an engine under PipeMax mix prompts into decode steps of up to so many tokens from now on."""
        self._commands.put(_MixBatches(step_tokens))

    def watch_rows(self, watch: RowWatch) -> None:
        """Tell ``watch`` of the rows to come, and close it with the engine. Call this before the first request."""
        self._watch = watch

    def admission_credit_tokens(self) -> int:
        return self._admission.credit_tokens()

    def stats(self) -> EngineStats:
        return self._ledger.stats()

    # -- the one caller of poll -------------------------------------------------------------------------------

    def poll(self, timeout_s: float) -> list[Completion]:
        if self._died is not None:
            raise self._died
        ended: list[Completion] = []
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                wait_s = 0.0 if ended else max(0.0, deadline_s - time.monotonic())
                item = self._completions.get(timeout=wait_s) if wait_s else self._completions.get_nowait()
            except queue.Empty:
                if not ended and (fault := self._steps.fault()):
                    self._died = EngineDiedError(fault)
                    raise self._died from None
                return ended
            if isinstance(item, EngineDiedError):
                self._died = item
                if ended:
                    return ended
                raise item
            ended += item

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        if self._thread.is_alive():
            self._commands.put(_Stop())
            self._thread.join()
        self._vllm.close()

    # -- the engine's thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_commands(wait=not self._engine.has_unfinished_requests()):
                if not self._engine.has_unfinished_requests():
                    continue
                with self._steps.step():
                    outputs = self._engine.step()
                finished = [self._completion(output) for output in outputs if output.finished]
                if finished:
                    self._admission.end(completion.request_id for completion in finished)
                    self._completions.put(finished)
                    if self._watch is not None:
                        self._watch.ended(finished)
        except Exception as error:  # whatever ends this thread must reach the caller of poll
            died = EngineDiedError(f"the engine died: {self._vllm.cause_of(error)}")
            died.__cause__ = error
            self._completions.put(died)

    def _take_commands(self, *, wait: bool) -> bool:
        """Carry out what was asked since the last step. Return ``False`` when told to stop."""
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if wait:
                self._ledger.time.charge(time.monotonic(), {TimePart.WAITING_FOR_INPUT: 1.0})
            wait = False
            match command:
                case _Add():
                    self._add(command)
                case _Abort():
                    self._engine.abort_request(list(command.request_ids))
                    if self._watch is not None:
                        self._watch.aborted(command.request_ids)
                case _Input():
                    self._tell_input(command.is_open)
                case _UseBatching():
                    use_batching(self._engine, command.batching, command.mixed_step_tokens)
                case _MixBatches():
                    mix_batches(self._engine, command.step_tokens)
                case _Stop():
                    return False

    def _add(self, command: _Add) -> None:
        try:
            self._engine.add_request(
                command.request_id,
                tokens_input(command.token_ids),
                self._sampling_params(command.token_ids, command.sampling),
            )
        except (ValueError, VLLMValidationError) as error:  # vLLM's verdict on this one request
            self._admission.end([command.request_id])
            refusal = RequestError(
                code=ErrorCode.ENGINE_ERROR, message=f"the engine refused the row: {error}"
            )
            self._completions.put([Completion(request_id=command.request_id, error=refusal)])
        else:
            self._admission.send(command.request_id)
            if self._watch is not None:
                self._watch.sent(command.request_id)

    def _tell_input(self, is_open: bool) -> None:
        self._ledger.input_open = is_open
        if self._hears_of_input:
            set_input_open(self._engine, is_open)

    def _completion(self, output: RequestOutput | PoolingRequestOutput) -> Completion:
        assert isinstance(output, RequestOutput), output
        (sequence,) = output.outputs
        error = None
        if sequence.finish_reason not in ("stop", "length", "abort"):
            error = RequestError(
                code=ErrorCode.ENGINE_ERROR,
                message=f"the engine ended the row with {sequence.finish_reason!r}",
            )
        return Completion(
            request_id=output.request_id,
            text=self._text(sequence) if error is None else None,
            finish_reason=sequence.finish_reason if error is None else None,
            prompt_tokens=len(output.prompt_token_ids or ()),
            completion_tokens=len(sequence.token_ids),
            token_ids=tuple(sequence.token_ids),
            error=error,
        )


def _sampling_params(sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop=list(sampling.stop),
        seed=sampling.seed,
        structured_outputs=(
            None
            if sampling.response_format is None
            else StructuredOutputsParams(json=sampling.response_format)
        ),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
