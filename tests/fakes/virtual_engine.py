"""An engine of the real controller on a virtual clock: pools, phases and feeding are real, the model is not.

The plans are carried out, and checked to be legal, by ``tests.unit.control.fake_engine``: a step takes 10 ms of a
clock that runs up to four times too fast. While the controller waits for input the two clocks keep step, for rows
come in real time. Lengths are a function of the prompt, one token of output is one word. Pools are said in the
config as ``vllm: {virtual: {...}}`` with fields of ``ControllerConfig``; what happened is in the metrics:
``switch_I_started`` and ``switch_I_finished``, requests at the I-th switch to decode, and ``switch_I_starved``, 1
where it was for want of input; ``most_held``, requests that it held at once.
"""

import hashlib
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import mean
from typing import Any

from pipemax.api import Completion, EngineStats, GenerationRequest
from pipemax.config import EngineConfig
from pipemax.domain.events import InputEnded, InputOpened, RequestAborted
from pipemax.domain.plan import Phase, PhaseReason, StepPlan
from pipemax.domain.units import RequestId
from pipemax.vllm_ext.engine.admission import AdmissionBook
from tests.fakes.idle_engine import IdleEngine
from tests.unit.control.fake_engine import STEP_S, FakeEngine, small_config, spec

_SPEED = 4


def virtual_config(*, load_s: float = 0.0, **controller: object) -> dict[str, object]:
    """An engine config; ``controller`` has fields of ``ControllerConfig``, ``load_s`` is how long its model loads."""
    return {"model": "virtual", "max_num_seqs": 1, "vllm": {"virtual": controller, "load_s": load_s}}


def lengths_of(prompt: str) -> tuple[int, int]:
    """Prompt and output tokens."""
    number = int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=4).digest())
    return 60 + number % 101, 5 + number // 101 % 36


def virtual_text(prompt: str) -> str:
    _, outputs = lengths_of(prompt)
    return " ".join(f"{prompt}/{i}" for i in range(outputs))


def rows_in_host_pool(config: EngineConfig, prompts: Sequence[str]) -> int:
    """As ``pipemax preflight`` says it of a real engine."""
    pools = small_config(**config.vllm["virtual"])
    return int(pools.host_blocks * pools.block_tokens / mean(sum(lengths_of(prompt)) for prompt in prompts))


class SwitchRecorder:
    """What had happened at each switch to decode, as metrics; see the module."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {"switches": 0.0}
        self._phase = Phase.PREFILL

    def observe(self, plan: StepPlan, started: set[str], num_finished: int) -> None:
        """``started`` is brought up to date with the plan."""
        if plan.phase is Phase.PREFILL:
            started.update(plan.run)
        elif self._phase is Phase.PREFILL:
            number = int(self.metrics["switches"])
            self.metrics[f"switch_{number}_started"] = len(started)
            self.metrics[f"switch_{number}_finished"] = num_finished
            self.metrics[f"switch_{number}_starved"] = plan.decision.reason is not PhaseReason.HOST_FULL
            self.metrics["switches"] = number + 1
        self._phase = plan.phase


def phases_with_all_rows_there(
    prompts: Sequence[str], *, max_tokens: int, controller: Mapping[str, Any]
) -> dict[str, float]:
    """The metrics of an engine that has all rows from the start: what phases are if input is no matter."""
    engine = FakeEngine(config=small_config(**controller), checks_integrity=False, checks_each_run=False)
    for prompt in prompts:
        prompt_tokens, outputs = lengths_of(prompt)
        engine.admit(spec(prompt, prompt_tokens, max_tokens=max_tokens), outputs)
    engine.controller.apply([InputOpened()])
    recorder, started = SwitchRecorder(), set[str]()
    while engine.sequences:
        recorder.observe(engine.step(), started, len(engine.finished))
        if len(started) == len(prompts):
            engine.controller.apply([InputEnded()])
    return recorder.metrics


def switches(metrics: Mapping[str, float], what: str) -> list[float]:
    """``started``, ``finished`` or ``starved`` of each switch to decode."""
    return [metrics[f"switch_{i}_{what}"] for i in range(int(metrics["switches"]))]


def refills(metrics: Mapping[str, float]) -> list[float]:
    """Requests that each prefill phase has taken in, without the first two, where lengths are still unknown, and the
    last, which ends with the table."""
    started = switches(metrics, "started")
    return [after - before for before, after in pairwise(started)][1:-1]


class VirtualEngine(IdleEngine):
    """See the module."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        time.sleep(config.vllm["load_s"])
        controller = small_config(**config.vllm["virtual"])
        self._engine = FakeEngine(config=controller, checks_integrity=False, checks_each_run=False)
        high_blocks = int(controller.host_high_watermark * controller.host_blocks)
        self._admission = AdmissionBook(high_blocks * controller.block_tokens, scheduler_reports=True)
        self._commands: queue.SimpleQueue[GenerationRequest | tuple[str, ...] | bool | None] = (
            queue.SimpleQueue()
        )
        self._completions: queue.SimpleQueue[list[Completion]] = queue.SimpleQueue()
        self._prompts: dict[str, str] = {}
        self._started: set[str] = set()
        self._num_known = self._num_finished = 0
        self._recorder = SwitchRecorder()
        self._metrics: dict[str, float] = {"most_held": 0.0}
        self._thread = threading.Thread(target=self._run, name="virtual", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            prompt_tokens, outputs = lengths_of(request.prompt or "")
            self._admission.submit(
                request.request_id, prompt_tokens=prompt_tokens, most_output_tokens=outputs
            )
            self._admission.send(request.request_id)
            self._commands.put(request)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._admission.end(request_ids)
        self._commands.put(tuple(request_ids))

    def set_input_open(self, is_open: bool) -> None:
        self._commands.put(is_open)

    def admission_credit_tokens(self) -> int:
        return self._admission.credit_tokens()

    def stats(self) -> EngineStats:
        return EngineStats(metrics=self._metrics | self._recorder.metrics)

    def poll(self, timeout_s: float) -> list[Completion]:
        ended: list[Completion] = []
        try:
            ended = self._completions.get(timeout=timeout_s)
            while True:
                ended += self._completions.get_nowait()
        except queue.Empty:
            return ended

    def close(self) -> None:
        self._commands.put(None)
        self._thread.join()

    # The engine's thread.

    def _run(self) -> None:
        while self._take_commands(wait=not self._engine.sequences):
            if not self._engine.sequences:
                continue
            plan = self._engine.step()
            self._deliver()
            self._recorder.observe(plan, self._started, self._num_finished)
            time.sleep(STEP_S if plan.wait_until_s is not None else STEP_S / _SPEED)
            self._report()

    def _take_commands(self, *, wait: bool) -> bool:
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            match command:
                case None:
                    return False
                case bool():
                    event = InputOpened() if command else InputEnded()
                    self._engine.controller.apply([event])
                case tuple():
                    self._abort(command)
                case request:
                    self._admit(request)

    def _admit(self, request: GenerationRequest) -> None:
        assert request.prompt is not None
        prompt_tokens, outputs = lengths_of(request.prompt)
        self._prompts[request.request_id] = request.prompt
        self._num_known += 1
        self._engine.admit(
            spec(request.request_id, prompt_tokens, max_tokens=request.sampling.max_tokens), outputs
        )
        self._metrics["most_held"] = max(self._metrics["most_held"], len(self._prompts))

    def _abort(self, request_ids: tuple[str, ...]) -> None:
        for request_id in map(RequestId, request_ids):
            if self._engine.sequences.pop(request_id, None) is not None:
                self._engine.controller.apply([RequestAborted(request_id=request_id)])
            self._prompts.pop(request_id, None)

    def _deliver(self) -> None:
        finished, self._engine.finished = self._engine.finished, {}
        if not finished:
            return
        self._num_finished += len(finished)
        done = [self._completion(request_id, outputs) for request_id, outputs in finished.items()]
        self._admission.end(finished)
        self._completions.put(done)

    def _completion(self, request_id: str, outputs: int) -> Completion:
        prompt = self._prompts.pop(request_id)
        return Completion(
            request_id=request_id,
            text=virtual_text(prompt),
            finish_reason="stop",
            prompt_tokens=lengths_of(prompt)[0],
            completion_tokens=outputs,
        )

    def _report(self) -> None:
        controller = self._engine.controller
        mean_tokens = controller.kv_tokens_per_request or 0.0
        self._metrics["kv_tokens_per_request"] = mean_tokens
        self._admission.report(
            demand_tokens=controller.admission_demand_tokens,
            mean_tokens=mean_tokens,
            num_known=self._num_known,
        )
