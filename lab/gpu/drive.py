"""Drive one engine without Spark, in rounds, and sample its figures.

Output lengths are exact: the end token is ignored. The results so far are written after each round, so that a run that
is ended keeps its finished rounds.
"""

import faulthandler
import json
import logging
import math
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import psutil

from lab.gpu.rates import Sample, WindowRates, decode_only, steady_pipemax, steady_stock, window_rates

Lengths = Sequence[tuple[int, int]]
"""Tokens of prompt and output, for each row."""

_SAMPLE_EVERY_S = 1.0
_CLOSE_S = 4.0
_WARM_UP_OUTPUT = 32
_NUM_AFTER_SWITCH = 16
_COUNTS = (
    *("evictions", "overwrites", "prefetches", "prefetched_blocks"),
    *("stored_bytes", "recomputes", "preemptions"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    limit_s: float
    """A round that takes longer is cut: its rows are aborted."""
    batching: str | None = None
    """``separated`` or ``mixed``, of PipeMax; None for stock vLLM."""
    step_tokens: int | None = None
    """Maximum tokens of a mixed step."""
    in_flight: int | None = None
    """So many rows at a time, another whenever one ends; None for all at once."""

    @property
    def name(self) -> str:
        if self.batching is not None:
            return self.batching
        return "queue" if self.in_flight is None else f"loop:{self.in_flight}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """One engine, and what to run on it."""

    config: Mapping[str, Any]
    """Fields of the engine config."""
    lengths: Lengths
    rounds: Sequence[Round]
    results: Path
    """JSON."""
    num_warm_up: int
    settle_s: float = 0.0
    """Seconds at the beginning of a round that are in no window."""
    is_input_open: bool = False
    """Tell the engine that more input may come, as a job does."""
    keeps_tokens: bool = False


def read_rounds(results: Path) -> list[dict[str, Any]]:
    """Return the finished rounds of a drive; none if there is no file."""
    return json.loads(results.read_text(encoding="utf-8"))["rounds"] if results.exists() else []


def drive(plan: Drive) -> None:
    """Start the engine, run the rounds, and write the results."""
    faulthandler.enable()
    ours = logging.getLogger("pipemax")
    ours.setLevel(logging.INFO)
    ours.addHandler(logging.StreamHandler(sys.stdout))
    from pipemax.api import OfflineEngine
    from pipemax.config import EngineConfig

    begin_s = time.monotonic()
    with exact_lengths():
        engine = OfflineEngine(EngineConfig.parse(dict(plan.config)))
        measured = None if engine.measured is None else asdict(engine.measured)["stages"]
        start = {"start_s": round(time.monotonic() - begin_s, 1), "measured": measured}
        rounds: list[dict[str, Any]] = []
        driver = _Driver(engine, plan)
        driver.warm_up()
        for number, round_ in enumerate(plan.rounds):
            rounds.append(driver.run(number, round_))
            plan.results.write_text(json.dumps({**start, "rounds": rounds}) + "\n", encoding="utf-8")
        _close(engine)


@contextmanager
def exact_lengths() -> Iterator[None]:
    """Have the engine ignore the end token, so that each row has as many output tokens as it asks for."""
    import pipemax.vllm_ext.engine.vllm_engine as module

    plain = module.sampling_params

    def with_exact_length(*arguments: Any, **options: Any) -> Any:
        params = plain(*arguments, **options)
        params.ignore_eos = True
        params.detokenize = False
        return params

    module.sampling_params = with_exact_length
    try:
        yield
    finally:
        module.sampling_params = plain


def _close(engine: Any) -> None:
    """Close the engine. After some seconds leave it: the job's processes are ended with it."""
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    closing.join(_CLOSE_S)
    if closing.is_alive():
        print(f"the engine does not close within {_CLOSE_S:.0f} s; its processes are ended", flush=True)


class _Driver:
    def __init__(self, engine: Any, plan: Drive) -> None:
        self._engine = engine
        self._plan = plan
        self._inner = engine._engine
        self._vllm_config = self._inner._vllm.vllm_config
        self._prompts = Prompts(self._inner._engine.renderer.tokenizer)

    def warm_up(self) -> None:
        self._answer("warm", self._plan.lengths[: self._plan.num_warm_up])

    def run(self, number: int, round_: Round) -> dict[str, Any]:
        """Run a round, and return its figures and samples."""
        if round_.batching is not None:
            self._switch(round_)
            # The counts begin again at the switch: these rows bring the new ones.
            self._answer(f"switch{number}", self._plan.lengths[:_NUM_AFTER_SWITCH])
        if self._plan.is_input_open:
            self._inner.set_input_open(True)
        # The same ids in each round of a comparison; else new ones, as an aborted row's may still be known.
        prefix = "r" if self._plan.keeps_tokens else f"r{number}-"
        requests = self._prompts.requests(prefix, self._plan.lengths, seed=2)
        before = self._engine.stats().metrics
        with _Sampling(self._engine) as sampling:
            ended = self._send(requests, round_)
        if len(ended) < len(requests):
            self._abort(requests)
        elif self._plan.is_input_open:
            self._inner.set_input_open(False)
        after = sampling.samples[-1].metrics
        figures = {
            "round": round_.name,
            "rows": len(ended),
            "of": len(requests),
            "seconds": round(sampling.samples[-1].at_s, 2),
            "errors": [each.error.message for each in ended if each.error][:3],
            **{name: after.get(name, 0.0) - before.get(name, 0.0) for name in _COUNTS},
            "windows": [asdict(window) for window in self._windows(round_, sampling.samples)],
            "samples": [asdict(sample) for sample in sampling.samples],
        }
        if self._plan.keeps_tokens:
            figures["tokens"] = {each.request_id: list(each.token_ids) for each in ended}
        return figures

    def _switch(self, round_: Round) -> None:
        from pipemax.domain.plan import Batching

        batching = Batching(round_.batching)
        most = self._vllm_config.scheduler_config.max_num_batched_tokens
        step_tokens = (round_.step_tokens or most) if batching is Batching.MIXED else None
        self._inner.use_batching(batching, step_tokens)

    def _answer(self, prefix: str, lengths: Lengths) -> None:
        short = [(prompt, min(output, _WARM_UP_OUTPUT)) for prompt, output in lengths]
        list(self._engine.generate(self._prompts.requests(prefix, short, seed=1)))

    def _send(self, requests: Sequence[Any], round_: Round) -> list[Any]:
        """Submit a round's requests, and return the completions of those that end in time."""
        deadline_s, ended = time.monotonic() + round_.limit_s, []
        at_first = len(requests) if round_.in_flight is None else round_.in_flight
        queue, is_open = iter(requests[at_first:]), self._plan.is_input_open
        # A thread of its own, because tokenizing thousands of prompts takes seconds.
        submitting = threading.Thread(target=self._engine.submit, args=(requests[:at_first],), daemon=True)
        submitting.start()
        if round_.in_flight is not None:
            submitting.join()  # one thread at a time submits
        while len(ended) < len(requests) and time.monotonic() < deadline_s:
            now_ended = self._engine.poll(0.05)
            ended += now_ended
            if more := [request for _, request in zip(now_ended, queue, strict=False)]:
                self._engine.submit(more)
            if is_open and len(ended) > 0.98 * len(requests):
                self._inner.set_input_open(is_open := False)
        submitting.join()
        return ended

    def _abort(self, requests: Sequence[Any]) -> None:
        self._engine.abort([request.request_id for request in requests])
        if self._plan.is_input_open:
            self._inner.set_input_open(False)
        deadline_s = time.monotonic() + 3.0  # what is in flight ends, and its KV is freed
        while time.monotonic() < deadline_s:
            self._engine.poll(0.1)

    def _windows(self, round_: Round, samples: Sequence[Sample]) -> list[WindowRates]:
        gpu_blocks, settle_s = self._vllm_config.cache_config.num_gpu_blocks, self._plan.settle_s
        if round_.batching is None:
            needs_waiting = round_.in_flight is None
            chosen = {"steady": steady_stock(samples, settle_s=settle_s, needs_waiting=needs_waiting)}
        else:
            chosen = {
                "steady": steady_pipemax(samples, settle_s=settle_s),
                "decode only": decode_only(samples, gpu_blocks=gpu_blocks),
            }
        windows = [
            window_rates(f"{round_.name}: {name}", each, gpu_blocks=gpu_blocks)
            for name, each in chosen.items()
        ]
        return [window for window in windows if window is not None]


class _Sampling:
    """Samples an engine's figures every second, from the first to the last moment of a round."""

    def __init__(self, engine: Any) -> None:
        self.samples: list[Sample] = []
        self._engine = engine
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._driver = psutil.Process()

    def __enter__(self) -> "_Sampling":
        self._begin_s = time.monotonic()
        self._take()
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()
        self._take()

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_EVERY_S):
            self._take()

    def _take(self) -> None:
        stats = self._engine.stats()
        self.samples.append(
            Sample(
                at_s=time.monotonic() - self._begin_s,
                waiting_requests=stats.waiting_requests,
                metrics=dict(stats.metrics),
                core_cpu_s=self._core_cpu_s(),
            )
        )

    def _core_cpu_s(self) -> float:
        seconds = 0.0
        for process in self._driver.children(recursive=True):
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            seconds += times.user + times.system
        return seconds


class Prompts:
    """Makes prompts of random words with about as many tokens as asked for."""

    def __init__(self, tokenizer: Any) -> None:
        known = (tokenizer.decode([token]) for token in range(300, min(4000, len(tokenizer))))
        self._words = [word for word in known if word.strip().isalpha()][:1500]
        if len(self._words) < 100:  # a vocabulary of bytes
            self._words = [a + b for a in "abcdefghijklmnopqrstuvwxyz" for b in "aeiounrst"]
        sample = " ".join(Random(5).choices(self._words, k=2000))
        self._tokens_per_word = len(tokenizer.encode(sample, add_special_tokens=False)) / 2000

    def requests(self, prefix: str, lengths: Lengths, *, seed: int) -> list[Any]:
        """Return requests that are the same for the same arguments."""
        from pipemax.api import GenerationRequest, Sampling

        rng = Random(seed)
        return [
            GenerationRequest(
                request_id=f"{prefix}{number}",
                prompt=" ".join(
                    rng.choices(self._words, k=max(1, math.floor(prompt / self._tokens_per_word)))
                ),
                sampling=Sampling(max_tokens=output),
            )
            for number, (prompt, output) in enumerate(lengths)
        ]
