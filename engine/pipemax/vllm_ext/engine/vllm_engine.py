"""A vLLM engine driven by one thread: requests come in through a queue, completions go out through another.

The submitting thread tokenizes, so that the engine's thread does nothing but step. vLLM's core runs in processes of
its own; when one dies, ``step`` raises, and the next ``poll`` raises that as EngineDiedError.
"""

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from functools import lru_cache, partial

from pipemax.answers.asks import Ask, Prompt, Reply
from pipemax.answers.book import RowBook
from pipemax.answers.choice_tree import ChoiceTree
from pipemax.answers.row import Row, RowTools
from pipemax.checkpoint.adapters import unknown_adapter
from pipemax.checkpoint.prompt_encoder import PromptEncoder, template_variables
from pipemax.checkpoint.special_tokens import SpecialTokens
from pipemax.config import ChatMode, EngineConfig, Policy
from pipemax.domain.errors import EngineDiedError, EngineStartError
from pipemax.domain.plan import Batching
from pipemax.domain.step_records import StepLimits, StepRecords, TuningFacts
from pipemax.engine import EngineStats
from pipemax.generation import Completion, GenerationRequest, RequestError
from pipemax.node.gpu_faults import is_gpu_fault
from pipemax.sim.measured_engine import MeasuredEngine
from pipemax.vllm_ext.calibration.measure import calibrate_at_start
from pipemax.vllm_ext.core_calls import set_input_open, use_batching
from pipemax.vllm_ext.engine.admission import AdmissionBook
from pipemax.vllm_ext.engine.live_limits import LiveLimits, tuning_facts
from pipemax.vllm_ext.engine.row_encoder import RowEncoder, core_prompt
from pipemax.vllm_ext.engine.sampling import sampling_params, told_of
from pipemax.vllm_ext.engine.stat_logger import EngineLedger, StatLogger
from pipemax.vllm_ext.engine.step_watch import StepWatch
from pipemax.vllm_ext.engine.thinking import NO_THINKING_LIMIT, VllmThinking
from pipemax.vllm_ext.engine.time_account import TimeAccount, TimePart
from pipemax.vllm_ext.launch.engine_room import admission_capacity_tokens, real_max_num_seqs
from pipemax.vllm_ext.launch.known_check import NodeCheck
from pipemax.vllm_ext.launch.start import RunningVllm
from pipemax.vllm_ext.launch.structured_outputs import structured_outputs
from pipemax.vllm_ext.node_check.run import check_at_start
from pipemax.vllm_ext.seam.vllm_types import (
    EngineCoreRequest,
    EngineInput,
    LoRARequest,
    PoolingParams,
    PoolingRequestOutput,
    RequestOutput,
    SamplingParams,
    VLLMValidationError,
)
from pipemax.wire import REFUSED, ErrorCode

_ENCODED_AT_ONCE = 512
"""Requests tokenized together: the engine begins with the first ones while the rest of a table are tokenized."""
_IMAGES_AT_ONCE = 16
"""The same for requests with images, each of which takes as long as hundreds of others."""


class VllmEngine:
    """Implements ``pipemax.api.Engine`` over vLLM, under either policy."""

    check: NodeCheck | None = None
    """What is known of PipeMax on this machine, if it was asked for."""

    def __init__(self, config: EngineConfig) -> None:
        """Block until the model is loaded. ``EngineStartError`` says why it could not be."""
        self._config = config
        self._ledger = EngineLedger(time=TimeAccount(time.monotonic()))
        self._vllm = RunningVllm.start(
            config, stat_loggers=[lambda vllm_config, engine_index: StatLogger(self._ledger)]
        )
        self._engine, vllm_config = self._vllm.engine, self._vllm.vllm_config
        self._at_close = ExitStack()
        self._rows = RowBook()
        self._thinking: VllmThinking | None = None
        try:
            self.measured = self._measure(config)
            self._prepare(config)
            envelope = self._vllm.envelope
            self._limits = LiveLimits(self._engine, vllm_config, begin=envelope.begin if envelope else None)
        except EngineStartError:  # it failed the check, and says why
            self._vllm.close()
            raise
        except Exception as error:  # of any type and module, as vLLM's own are
            cause = self._vllm.cause_of(error)
            self._vllm.close()
            raise EngineStartError(
                f"model {config.model!r} was loaded and cannot be served: {cause}"
            ) from error
        # vLLM numbers adapters from 1 on.
        self._adapters = {
            name: LoRARequest(name, number, directory)
            for number, (name, directory) in enumerate(config.lora.items(), start=1)
        }
        self._task: str = config.task
        self._is_guidance = structured_outputs(config).get("backend") == "guidance"
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self._hears_of_input = config.policy is Policy.PIPEMAX
        self._admission = AdmissionBook(
            admission_capacity_tokens(vllm_config), scheduler_reports=self._hears_of_input
        )
        # What the engine's thread is asked to do; None asks it to stop.
        self._commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._completions: queue.SimpleQueue[list[Completion] | EngineDiedError] = queue.SimpleQueue()
        self._died: EngineDiedError | None = None
        self._steps = StepWatch()
        self._thread = threading.Thread(target=self._run, name="engine-step", daemon=True)
        self._ledger.time.charge(time.monotonic(), {TimePart.START_UP: 1.0})
        self._ledger.max_num_seqs = real_max_num_seqs(vllm_config)
        self._ledger.admission = self._admission
        self._thread.start()

    # -- what a pooling task does in another way ---------------------------------------------------------------

    def _measure(self, config: EngineConfig) -> MeasuredEngine | None:
        """Check the loaded engine and measure it, as far as the config wants it."""
        self.check = check_at_start(self._engine, self._vllm.vllm_config, config)
        return calibrate_at_start(self._engine, self._vllm.vllm_config, config)

    def _prepare(self, config: EngineConfig) -> None:
        """Make what turns rows into asks. An exception says why the loaded model cannot be served."""
        renderer, model = self._engine.renderer, self._vllm.vllm_config.model_config
        prompts = PromptEncoder(renderer.tokenizer, chat=config.chat, max_model_len=model.max_model_len)
        self._encoder = RowEncoder(renderer, model, prompts, config)
        self._at_close.callback(self._encoder.close)
        self._thinking = self._make_thinking(config)
        self._tools = RowTools(
            encode=self._encode,
            tree_of=lru_cache(maxsize=64)(self._tree),
            thinking=self._thinking,
            fault_of_length=prompts.fault_of_length,
        )

    def _open(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Ask] | Completion]:
        """Yield the first asks of each row, or its error."""
        for request, encoded in zip(requests, self._encoder.encode(requests), strict=True):
            fault = encoded if isinstance(encoded, RequestError) else self._fault_of(request)
            if isinstance(encoded, RequestError) or fault is not None:
                yield Completion(request_id=request.request_id, error=fault)
            else:
                yield self._rows.open(request.request_id, Row(request, encoded, self._tools))

    def _sampling_params(self, ask: Ask) -> SamplingParams | PoolingParams:
        """Return vLLM's parameters of an ask. ``ValueError`` becomes the row's error."""
        skip = self._thinking is None or self._thinking.skip_special_tokens
        return sampling_params(ask, skip_special_tokens=skip, is_guidance=self._is_guidance)

    def _outcome(self, output: RequestOutput | PoolingRequestOutput) -> Reply:
        assert isinstance(output, RequestOutput), output
        (sequence,) = output.outputs
        return told_of(sequence)

    # -- any thread -------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        size = _IMAGES_AT_ONCE if any(request.images for request in requests) else _ENCODED_AT_ONCE
        for first in range(0, len(requests), size):
            self._submit(requests[first : first + size])

    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        refused: list[Completion] = []
        for asks in self._open(requests):
            if isinstance(asks, Completion):
                refused.append(asks)
            else:
                self._send(asks)
        if refused:
            self._completions.put(refused)

    def _send(self, asks: Sequence[Ask]) -> None:
        for ask in asks:
            most_tokens = 0 if ask.sampling.is_pooling else 1 if ask.allowed else ask.sampling.max_tokens
            prompt_tokens = len(ask.prompt.token_ids)
            self._admission.submit(
                ask.ask_id,
                prompt_tokens=prompt_tokens,
                most_output_tokens=max(0, min(most_tokens, self._max_model_len - prompt_tokens)),
            )
            self._commands.put(partial(self._add, ask))

    def _encode(self, request: GenerationRequest) -> Prompt | RequestError:
        (encoded,) = self._encoder.encode([request])
        return encoded

    def _fault_of(self, request: GenerationRequest) -> RequestError | None:
        """Return why this engine cannot take the row, if it cannot."""
        name = request.sampling.lora
        if request.sampling.task != self._task:
            message = (
                f"the row's task is {request.sampling.task}, and the engine was started for {self._task}"
            )
        elif name is not None and name not in self._adapters:
            message = unknown_adapter(name, list(self._adapters))
        elif request.sampling.thinking_tokens is not None and (
            self._thinking is None or not self._thinking.can_be_limited
        ):
            message = NO_THINKING_LIMIT
        else:
            return None
        return RequestError(code=ErrorCode.INVALID_PARAMETER, message=message)

    def abort(self, request_ids: Sequence[str]) -> None:
        ask_ids = self._rows.abort(request_ids)
        self._admission.end(ask_ids)
        self._commands.put(partial(self._engine.abort_request, list(ask_ids)))

    def set_input_open(self, is_open: bool) -> None:
        self._commands.put(partial(self._tell_input, is_open))

    def use_batching(self, batching: Batching, mixed_step_tokens: int | None) -> None:
        """Have an engine under PipeMax batch so from now on. Call this before the first request."""
        self._commands.put(partial(use_batching, self._engine, batching, mixed_step_tokens))

    def most_limits(self) -> list[StepLimits]:
        return self._limits.ceilings

    def limits(self) -> list[StepLimits]:
        return self._limits.present

    def set_limits(self, limits: Sequence[StepLimits]) -> None:
        self._limits.choose(limits)
        self._commands.put(partial(self._limits.set, limits[0]))

    def take_step_records(self) -> list[StepRecords]:
        if self._limits.ceilings:
            self._commands.put(self._limits.ask)
        return self._limits.take()

    def speculate(self, replicas: Collection[int]) -> None:
        raise ValueError("this engine has no replicas that could be started again with n-gram speculation")

    def tuning_facts(self) -> TuningFacts | None:
        return tuning_facts(self._config, self._vllm.vllm_config) if self._limits.ceilings else None

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
        if self._thread.is_alive():
            self._commands.put(None)
            self._thread.join()
        self._at_close.close()
        self._vllm.close()

    # -- the engine's thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_commands(wait=not self._engine.has_unfinished_requests()):
                if not self._engine.has_unfinished_requests():
                    continue
                with self._steps.step():
                    outputs = self._engine.step()
                ended = [(output.request_id, self._outcome(output)) for output in outputs if output.finished]
                if ended:
                    self._take(ended)
        except Exception as error:  # whatever ends this thread must reach the caller of poll
            cause = self._vllm.cause_of(error)
            died = EngineDiedError(f"the engine died: {cause}", is_machine_fault=is_gpu_fault(cause))
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
            if command is None:
                return False
            command()

    def _add(self, ask: Ask) -> None:
        try:
            params, adapter = self._sampling_params(ask), self._adapters.get(ask.sampling.lora or "")
            request = self._core_request(ask, params, adapter)
            self._engine.add_request(ask.ask_id, request, params, lora_request=adapter)
        except (ValueError, VLLMValidationError) as error:  # vLLM's verdict on this one request
            refusal = RequestError(code=ErrorCode.ENGINE_ERROR, message=f"{REFUSED}: {error}")
            self._take([(ask.ask_id, Reply(error=refusal))])
        else:
            self._admission.send(ask.ask_id)

    def _core_request(
        self, ask: Ask, params: SamplingParams | PoolingParams, adapter: LoRARequest | None
    ) -> EngineInput | EngineCoreRequest:
        prompt = core_prompt(ask.prompt)
        is_bound = isinstance(params, SamplingParams) and params.structured_outputs is not None
        if self._thinking is None or not is_bound:
            return prompt
        # A parser of the core finds the end of the thinking in the output, and may need the template's variables.
        request = self._engine.input_processor.process_inputs(
            ask.ask_id,
            prompt,
            params,
            supported_tasks=self._engine.get_supported_tasks(),
            lora_request=adapter,
        )
        request.reasoning_ended = self._thinking.is_over(ask.prompt.token_ids, ask.sampling)
        request.reasoning_parser_kwargs = {"chat_template_kwargs": template_variables(ask.sampling)}
        return request

    def _tell_input(self, is_open: bool) -> None:
        self._ledger.input_open = is_open
        if self._hears_of_input:
            set_input_open(self._engine, is_open)

    def _take(self, outcomes: Sequence[tuple[str, Reply]]) -> None:
        """Send the next asks of these asks' rows, and hand out the rows that have ended."""
        self._admission.learn(len(outcome.token_ids) for _, outcome in outcomes if outcome.error is None)
        self._admission.end(ask_id for ask_id, _ in outcomes)
        ended = []
        for ask_id, outcome in outcomes:
            asks, completion = self._rows.take(ask_id, outcome)
            self._send(asks)
            if completion is not None:
                ended.append(completion)
        if ended:
            self._completions.put(ended)

    def _make_thinking(self, config: EngineConfig) -> VllmThinking | None:
        if config.reasoning_parser is None:
            return None
        return VllmThinking(
            self._vllm.vllm_config,
            self._engine.renderer.tokenizer,
            name=config.reasoning_parser,
            has_turns=config.chat is not ChatMode.NEVER,
        )

    def _tree(self, choices: tuple[str, ...]) -> ChoiceTree:
        tokenizer = self._engine.renderer.tokenizer
        ends = self._vllm.vllm_config.model_config.try_get_generation_config().get("eos_token_id")
        end_ids = {*(ends if isinstance(ends, list) else [ends]), getattr(tokenizer, "eos_token_id", None)}
        return ChoiceTree.of(
            choices,
            partial(tokenizer.encode, add_special_tokens=False),
            sorted(end for end in end_ids if end is not None),
            SpecialTokens(tokenizer).words,
        )
