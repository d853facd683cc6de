"""A fast, deterministic engine that implements ``pipemax.api.Engine``.

Its answer to a prompt is a function of the prompt (``expected_text``), a word counts as a token, and rows end in
windows of wall time in an order other than that of their submission. How it behaves is said in the config
(``tests.fakes.settings``), or by marks in a prompt:

- ``[[die]]``: the engine dies; ``[[die-once PATH]]``: unless the file exists, which it then makes;
- ``[[crash]]``, ``[[crash-once PATH]]``: likewise, but the whole server process is killed;
- ``[[abort]]``, ``[[abort-once PATH]]``: likewise, by abort(), as a failed assertion in C would;
- ``[[gpu-once PATH]]``: likewise, by a fault of a GPU; ``[[assert]]``: by an assertion of a kernel;
- ``[[memory-once PATH]]``: likewise, the engine asks for more memory than there is;
- ``[[hang-once PATH]]``: likewise, ``poll`` never comes back; ``[[slow SECONDS]]``: this row takes so long;
- ``[[error]]``: this row alone fails; a schema with the word "unknown" is refused;
- ``[[log LINES]]``: the engine logs one line so often; ``[[print LINES]]``: a process of it prints so many;
- ``[[loop]]``: the answer says one word over and over;
- the answer is, for ``[[seed]]``, the row's seed; for ``[[lora]]``, its adapter; for ``[[environ]]``, the server's
  environment as JSON; for ``[[counts]]``, what the engine was asked so far, as JSON (``FakeCounts``).
"""

import dataclasses
import hashlib
import heapq
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipemax.api import Completion, EngineStats, GenerationRequest, Image, Message, RequestError
from pipemax.checkpoint.image_sources import ImageSourceError, read_source
from pipemax.config import EngineConfig
from pipemax.domain.errors import EngineDiedError, EngineStartError
from pipemax.domain.step_records import StepRecords
from pipemax.node.gpu_faults import is_gpu_fault
from pipemax.wire import REFUSED, ErrorCode
from tests.fakes.answers import answered
from tests.fakes.engine_child import start_child
from tests.fakes.idle_engine import IdleEngine
from tests.fakes.pooled import pooled
from tests.fakes.settings import GPU_FAULT, KERNEL_ASSERTION, FakeOptions

if TYPE_CHECKING:
    from tests.unit.tuning.synthetic_engine import SyntheticEngine

log = logging.getLogger(__name__)

_MARK = re.compile(r"\[\[([a-z-]+)(?: ([^\]]+))?\]\]")
DEFAULT_MAX_MODEL_LEN = 4_096


@dataclasses.dataclass(slots=True)
class FakeCounts:
    """What the engine was asked."""

    submitted: int = 0
    aborted: int = 0
    most_in_flight: int = 0


def image_text(content: bytes) -> str:
    """What the fake reads in place of an image."""
    return f"image-{Image(content=content).digest()[:8]}"


def makes_mistake(prompt: str, errs: float) -> bool:
    """Whether an engine of ``FakeOptions.errs`` answers this prompt as if it were another."""
    return _share(prompt) < errs


def _share(text: str) -> float:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) / 2**32


def count_tokens(text: str) -> int:
    return len(text.split())


class FakeEngine(IdleEngine):
    """See the module."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._options = FakeOptions(**config.vllm.get("fake", {}))
        if "speculative_config" in config.vllm:
            self._options = dataclasses.replace(self._options, **self._options.speculating)
        super().__init__(self._options.most_limits, self._options.tunings)
        time.sleep(self._options.load_s)
        _wait_for_others(self._options)
        if self._options.start_error is not None:
            raise EngineStartError(self._options.start_error)
        self._changed = threading.Condition()
        self._queue: list[tuple[int, int, str, Completion]] = []  # a heap: (window, shuffle, id, completion)
        self._in_flight: set[str] = set()
        self._busy_until_s = time.monotonic()
        self._last_end_s = time.monotonic()
        self._death: str | None = None
        self._hangs = False
        self._wants_memory = False
        if self._options.dies == "at once":
            self._death = "the fake died at once, as it was told"
        if self._options.dies == "of its GPU":
            self._death = GPU_FAULT
        self._steps = _synthetic() if self._options.steps_s else None
        self.counts = FakeCounts()
        self._output_tokens = 0
        self._times_asked: Counter[str] = Counter()
        self._last_prompts: deque[list[str]] = deque(maxlen=self._options.prefix_memory)
        self._prefix_words = self._prefix_hits = 0
        self._child = start_child(self._options) if self._options.child_process else None

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        with self._changed:
            self._raise_if_dead()
            if self._options.dies == "of any row":
                self._death = "the fake died of a row, as it was told"
            for request in requests:
                self.counts.submitted += 1
                self._read_prefix(request.prompt or "")
                self._in_flight.add(request.request_id)
                completion, slow_s = self._answer(request)
                heapq.heappush(self._queue, self._entry(completion, slow_s))
            self.counts.most_in_flight = max(self.counts.most_in_flight, len(self._in_flight))
            self._changed.notify_all()

    def poll(self, timeout_s: float) -> list[Completion]:
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._raise_if_dead()
                while self._hangs:
                    self._changed.wait()
                if self._wants_memory:
                    bytearray(2**62)
                now_s = time.monotonic()
                done = self._pop_ended(int(now_s / self._options.window_s))
                if done or now_s >= deadline_s:
                    return done
                wait_s = deadline_s - now_s
                if self._queue:
                    wait_s = min(wait_s, (self._queue[0][0] + 1) * self._options.window_s - now_s)
                self._changed.wait(max(0.001 if self._options.held_by is None else 0.01, wait_s))

    def abort(self, request_ids: Sequence[str]) -> None:
        with self._changed:
            known = self._in_flight.intersection(request_ids)
            self.counts.aborted += len(known)
            self._in_flight -= known
            # What is left of a row in the heap would keep the engine busy: an aborted row frees its time.
            self._queue = [entry for entry in self._queue if entry[2] not in known]
            heapq.heapify(self._queue)

    def admission_credit_tokens(self) -> int:
        return self._options.admission_credit_tokens

    def take_step_records(self) -> list[StepRecords]:
        if self._steps is None:
            return super().take_step_records()
        self._steps.limits = self.limits()[0]
        end_s = self._steps.now_s + self._options.steps_s
        parts = []
        while self._steps.now_s < end_s:
            parts.append(self._steps.advance()[0])
        return [StepRecords.joined(parts)]

    def stats(self) -> EngineStats:
        held = len(self._in_flight)
        running = held if self._options.most_running is None else min(held, self._options.most_running)
        metrics = {"child_pid": float(self._child.pid)} if self._child else {}
        metrics |= {name: float(value) for name, value in dataclasses.asdict(self.counts).items()}
        if self._prefix_words:
            metrics["prefix_cache_hit_rate"] = self._prefix_hits / self._prefix_words
        metrics["output_tokens"] = float(self._output_tokens)
        phase = "decode" if running else "idle"
        return EngineStats(
            phase=phase,
            running_requests=running,
            waiting_requests=held - running,
            kv_usage=min(1.0, running / 1000),
            metrics=metrics,
            policy=self._policy(),
        )

    def _policy(self) -> dict[str, Any]:
        """As an engine reports its choice, with what it was told of the rows."""
        lengths = self._config.row_lengths
        inputs = {} if lengths is None else {"sampled_rows": len(lengths.prompt_tokens), "rows": lengths.rows}
        return {"chosen": "vllm", "reason": "a fake has no scheduler", "inputs": inputs}

    def close(self) -> None:
        time.sleep(self._options.close_s)
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def _read_prefix(self, prompt: str) -> None:
        if not self._options.prefix_memory:
            return
        words = prompt.split()
        known = (
            takewhile(lambda pair: pair[0] == pair[1], zip(words, last, strict=False))
            for last in self._last_prompts
        )
        self._prefix_hits += max((sum(1 for _ in pairs) for pairs in known), default=0)
        self._prefix_words += len(words)
        self._last_prompts.append(words)

    def _pop_ended(self, window: int) -> list[Completion]:
        done = []
        while self._queue and self._queue[0][0] < window and not self._is_held():
            _, _, request_id, completion = heapq.heappop(self._queue)
            self._in_flight.remove(request_id)
            self._output_tokens += completion.completion_tokens
            done.append(completion)
            self._last_end_s = time.monotonic()
        return done

    def _is_held(self) -> bool:
        path = self._options.held_by
        is_soon = time.monotonic() < self._last_end_s + self._options.held_row_s
        return path is not None and is_soon and Path(path).exists()

    def _entry(self, completion: Completion, slow_s: float) -> tuple[int, int, str, Completion]:
        shuffle = int.from_bytes(hashlib.blake2b(completion.request_id.encode(), digest_size=4).digest())
        now_s = time.monotonic()
        ends_s = now_s + slow_s + self._options.latency_s * (1 + shuffle / 2**32)
        if self._options.tokens_per_s is not None:
            self._busy_until_s = max(self._busy_until_s, now_s)
            self._busy_until_s += completion.completion_tokens / self._options.tokens_per_s
            ends_s = max(ends_s, self._busy_until_s)
        return int(ends_s / self._options.window_s), shuffle, completion.request_id, completion

    def _answer(self, request: GenerationRequest) -> tuple[Completion, float]:
        """The row's end, and for how long it is slow."""
        prompt = request.prompt
        if prompt is None and request.messages:
            try:
                prompt = "\n".join(self._seen(part) for turn in request.messages for part in _parts(turn))
            except ImageSourceError as error:
                return _error(request, ErrorCode.INVALID_IMAGE, str(error)), 0.0
        if prompt is None or not prompt.strip():
            return _error(request, ErrorCode.EMPTY_PROMPT, "the prompt is empty"), 0.0
        prompt_tokens = count_tokens(f"{request.system or ''} {prompt}")
        longest = self._config.max_model_len or DEFAULT_MAX_MODEL_LEN
        if prompt_tokens + 1 > longest:
            message = f"the prompt has {prompt_tokens} tokens, max_model_len is {longest}"
            return _error(request, ErrorCode.PROMPT_TOO_LONG, message), 0.0
        is_wrong = makes_mistake(prompt, self._options.errs)
        self._times_asked[prompt] += 1
        if self._times_asked[prompt] > 1 and makes_mistake(prompt, self._options.wavers):
            is_wrong = not is_wrong
        if request.sampling.is_pooling:
            if is_wrong and request.prompt is not None:
                request = dataclasses.replace(request, prompt=f"{prompt} mistaken")
            return pooled(request, prompt, prompt_tokens=prompt_tokens), 0.0
        text, slow_s = self._text(request, f"{prompt} mistaken" if is_wrong else prompt)
        if text is None:
            return _error(request, ErrorCode.ENGINE_ERROR, "the fake failed this row, as it was told"), 0.0
        if "unknown" in (request.sampling.response_format or ""):
            return _error(request, ErrorCode.ENGINE_ERROR, f"{REFUSED}: unknown type"), 0.0
        thinks = self._config.reasoning_parser is not None
        completion = answered(request, text, prompt_tokens=prompt_tokens, thinks=thinks)
        if self._options.errs:
            # Surer of what is right, and as sure of some of what is wrong.
            sure = (0.9 if is_wrong else 1.0) - 0.4 * _share(f"sure of {prompt}")
            if completion.probability is not None:
                completion = dataclasses.replace(completion, probability=sure)
            if completion.logprob_sum is not None:
                completion = dataclasses.replace(
                    completion,
                    logprob_sum=math.log(sure),
                    field_probabilities=tuple(
                        (name, sure) for name, _ in completion.field_probabilities or ()
                    ),
                )
        return completion, slow_s

    def _seen(self, part: str | Image) -> str:
        if isinstance(part, str):
            return part
        limits, content = self._config.images, part.content
        if content is None:
            content = read_source(
                part.source or "", max_bytes=limits.max_bytes, directories=limits.directories
            )
        return image_text(content)

    def _text(self, request: GenerationRequest, prompt: str) -> tuple[str | None, float]:
        text: str | None = None
        if request.sampling.response_format is not None:
            text = json.dumps(instance_of(json.loads(request.sampling.response_format), prompt))
        else:
            text = " ".join(f"reply to {prompt}".split())
        slow_s = 0.0
        if "[[" in prompt:
            for name, argument in _MARK.findall(prompt):
                match name:
                    case "slow":
                        slow_s = float(argument)
                    case "error":
                        text = None
                    case "environ":
                        text = json.dumps(dict(os.environ))
                    case "counts":
                        text = json.dumps(dataclasses.asdict(self.counts), separators=(",", ":"))
                    case "log":
                        for number in range(int(argument)):
                            log.warning("the fake logs line %d", number)
                    case "print":
                        script = f"import os\nfor n in range({argument}): os.write(2, b'printed %d\\n' % n)"
                        subprocess.run([sys.executable, "-c", script], check=True)
                    case "seed":
                        text = str(request.sampling.seed)
                    case "loop":
                        text = "reply" + " again" * 5_000
                    case "lora":
                        text = str(request.sampling.lora)
                    case _ if self._death is None:
                        self._misbehave(name, argument)
        return text, slow_s

    def _misbehave(self, name: str, argument: str) -> None:
        kind, _, once = name.partition("-")
        if once and Path(argument).exists():
            return
        if once:
            Path(argument).touch()
        match kind:
            case "die":
                self._death = "the fake died, as it was told"
            case "gpu":
                self._death = GPU_FAULT
            case "assert":
                self._death = KERNEL_ASSERTION
            case "hang":
                self._hangs = True
            case "memory":
                self._wants_memory = True
            case "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            case "abort":
                os.abort()
            case _:
                raise ValueError(f"unknown mark [[{name} {argument}]]")

    def _raise_if_dead(self) -> None:
        if self._death is None and self._child is not None and self._child.poll() is not None:
            self._death = f"worker {self._child.pid} of the engine died with status {self._child.returncode}"
        if self._death is not None:
            raise EngineDiedError(self._death, is_machine_fault=is_gpu_fault(self._death))


def instance_of(schema: dict[str, Any], prompt: str) -> Any:
    """A value that satisfies a simple JSON schema, chosen by the prompt."""
    number = int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=4).digest())
    if "enum" in schema:
        return schema["enum"][number % len(schema["enum"])]
    if "const" in schema:
        return schema["const"]
    if "anyOf" in schema:
        return instance_of(schema["anyOf"][0], prompt)
    if "pattern" in schema:  # of a decimal, the only one that tests have
        return f"{number % 10}.5"
    if "format" in schema:
        day = f"2026-01-{number % 28 + 1:02}"
        return day if schema["format"] == "date" else f"{day}T12:00:00Z"
    kind = schema.get("type", "object")
    match kind if isinstance(kind, str) else kind[0]:
        case "object":
            return {
                name: instance_of(part, prompt + name) for name, part in schema.get("properties", {}).items()
            }
        case "array":
            return [instance_of(schema.get("items", {"type": "string"}), prompt)]
        case "string":
            return f"text-{number % 1000}"
        case "integer":
            return schema.get("minimum", 0) + number % 10
        case "number":
            return schema.get("minimum", 0) + (number % 100) / 8
        case "boolean":
            return bool(number % 2)
        case _:
            return None


def _parts(turn: Message) -> tuple[str | Image, ...]:
    return (turn.content,) if isinstance(turn.content, str) else turn.content


def _error(request: GenerationRequest, code: ErrorCode, message: str) -> Completion:
    return Completion(request_id=request.request_id, error=RequestError(code=code, message=message))


def _synthetic() -> "SyntheticEngine":
    from tests.unit.tuning.synthetic_engine import SyntheticEngine, memory_bound

    return SyntheticEngine(memory_bound)


def _wait_for_others(options: FakeOptions) -> None:
    if options.starts_together is None:
        return
    directory, count = Path(options.starts_together[0]), options.starts_together[1]
    (directory / str(os.getpid())).touch()
    deadline_s = time.monotonic() + options.together_s
    while len(list(directory.iterdir())) < count:
        if time.monotonic() > deadline_s:
            raise EngineStartError(f"it is the only one of {count} engines that starts")
        time.sleep(0.02)
