"""Measure what a worker's step costs the host: µs for each decode, and for each row that comes back.

    python -m lab.bench.worker_step [--decodes N] [--returning N] [--tokens N] [--steps N] [--rounds N] [--profile]

A row that lost its slot of vLLM's V2 model runner is sent like a new one when it comes back, with its tokens and
blocks. Each step has ``--decodes`` rows of ``--tokens`` tokens, of which ``--returning`` come back in place of as many
that leave. The runner is vLLM's, in this process, without kernels, model and attention metadata (``host_runner``); what
CUDA's calls take is therefore not in it. The parts, in CPU time of the thread:

    resend     the scheduler makes the messages of the rows that come back
    pickle     the step's message is pickled; its bytes are printed too
    unpickle   a worker unpickles it
    runner     the worker's step: ``execute_model``, ``sample_tokens`` and the output

µs a row are the difference of steps with and without rows that come back; µs a decode the difference of steps with
``--decodes`` and with a quarter of them, none of which come back. Each is the median of the rounds, with their range.
Rounds take turns with the tokens staged in vLLM's list (``list``) and as PipeMax stages them (``array``).
``--profile`` prints on which lines the steps spend their time, by a timer's signal; a call of C counts for its line.
"""

import argparse
import gc
import json
import logging
import os
import pickle
import signal
import statistics
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.request import Request

from lab.bench.host_runner import BLOCK_TOKENS, VOCABULARY, Kernel, host_runner, runner_environment
from pipemax.domain.plan import StepId
from pipemax.transfer.commands import StepCopies
from pipemax.vllm_ext.scheduler.worker_slots import UNLIMITED, WorkerState
from pipemax.vllm_ext.worker.connector import StepMetadata

PARTS = ("resend", "pickle", "unpickle", "runner")
_MOST_OUTPUTS = 200


class Steps:
    """A runner, and the rows that it decodes; those that are away wait in turn."""

    def __init__(self, runner: Any, *, num_rows: int, num_tokens: int) -> None:
        self._runner = runner
        self._num_tokens = num_tokens
        rng = np.random.default_rng(0)
        self._rows = [self._row(f"row-{number}", rng) for number in range(num_rows)]
        blocks = rng.integers(1, 60_000, (num_rows, num_tokens // BLOCK_TOKENS + 1)).tolist()
        self._blocks = dict(zip((row.request_id for row in self._rows), blocks, strict=True))
        self._workers = WorkerState(UNLIMITED)
        self._running: list[Request] = []
        self._away = list(self._rows)
        self._step = 0
        self.seconds: dict[str, float] = {}
        """Of the last step, by part."""
        self.num_bytes = 0
        """Of its message."""

    def _row(self, name: str, rng: np.random.Generator) -> Request:
        tokens = rng.integers(0, VOCABULARY, self._num_tokens).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=_MOST_OUTPUTS, ignore_eos=True)
        row = Request(name, tokens[:-1], params, None)
        row.append_output_token_ids(tokens[-1:])
        row.num_computed_tokens = self._num_tokens - 1
        return row

    def resize(self, num_decodes: int) -> None:
        """Have so many rows running from now on."""
        if (num_more := num_decodes - len(self._running)) > 0:
            self.run(num_coming=num_more)
        else:
            self.run(num_leaving=-num_more)

    def run(self, *, num_coming: int = 0, num_leaving: int = 0) -> None:
        """Run a step in which rows come back and leave, those that have run or been away longest."""
        left, self._running = self._running[:num_leaving], self._running[num_leaving:]
        coming, self._away = self._away[:num_coming], [*self._away[num_coming:], *left]
        news = self._timed("resend", lambda: [self._resent(row) for row in coming])
        message = self._message(news, coming, left)
        self._running += coming
        pickled = self._timed("pickle", lambda: pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        self.num_bytes = len(pickled)
        received = self._timed("unpickle", lambda: pickle.loads(pickled))
        self._timed("runner", lambda: self._on_worker(received))
        self._step += 1

    def _resent(self, row: Request) -> Any:
        return self._workers.resend(row, (self._blocks[row.request_id],))

    def _message(
        self, news: list[Any], coming: Sequence[Request], left: Sequence[Request]
    ) -> SchedulerOutput:
        known = [row.request_id for row in self._running]
        scheduled = dict.fromkeys([*known, *(row.request_id for row in coming)], 1)
        message = SchedulerOutput(
            scheduled_new_reqs=news,
            scheduled_cached_reqs=CachedRequestData(
                req_ids=known,
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=[None] * len(known),
                num_computed_tokens=[self._num_tokens - 1] * len(known),
                num_output_tokens=[1] * len(known),
            ),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=len(scheduled),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            preempted_req_ids={row.request_id for row in left},
            finished_req_ids=set(),
            free_encoder_mm_hashes=[],
        )
        message.kv_connector_metadata = StepMetadata(StepId(self._step), StepCopies())
        return message

    def _on_worker(self, message: SchedulerOutput) -> None:
        self._runner.execute_model(message)
        self._runner.sample_tokens(None).get_output()

    def _timed(self, part: str, work: Callable[[], Any]) -> Any:
        begin_s = time.thread_time()
        result = work()
        self.seconds[part] = time.thread_time() - begin_s
        return result


def median_us(steps: Steps, num_steps: int, **changes: int) -> dict[str, float]:
    """Return the parts' medians of some steps, in microseconds, and the median bytes of their messages."""
    found: dict[str, list[float]] = {name: [] for name in (*PARTS, "bytes", "launches")}
    for _ in range(num_steps):
        launches = Kernel.num_launches
        steps.run(**changes)
        for part in PARTS:
            found[part].append(1e6 * steps.seconds[part])
        found["bytes"].append(steps.num_bytes)
        found["launches"].append(Kernel.num_launches - launches)
    return {name: statistics.median(values) for name, values in found.items()}


def measure_round(steps: Steps, num_decodes: int, num_returning: int, num_steps: int) -> dict[str, Any]:
    """Return a round's figures: of each decode and of each row that comes back, by part."""
    few = num_decodes // 4
    steps.resize(few)
    with_few = median_us(steps, num_steps)
    steps.resize(num_decodes)
    plain = median_us(steps, num_steps)
    mixed = median_us(steps, num_steps, num_coming=num_returning, num_leaving=num_returning)
    return {
        "decode": {name: (plain[name] - with_few[name]) / (num_decodes - few) for name in plain},
        "returning": {name: (mixed[name] - plain[name]) / num_returning for name in plain},
        "step": mixed,
    }


def profile(steps: Steps, num_returning: int, seconds: float) -> list[tuple[str, float]]:
    """Return the lines on which steps spend CPU time, with their shares, the largest first."""
    lines: Counter[str] = Counter()

    def note(_: int, frame: Any) -> None:
        path = frame.f_code.co_filename.rpartition("site-packages/")[2]
        lines[f"{path}:{frame.f_lineno} {frame.f_code.co_name}"] += 1

    with _each_millisecond(note):
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            steps.run(num_coming=num_returning, num_leaving=num_returning)
    return [(line, count / lines.total()) for line, count in lines.most_common(40)]


@contextmanager
def _each_millisecond(note: Callable[[int, Any], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGPROF, note)
    signal.setitimer(signal.ITIMER_PROF, 1e-3, 1e-3)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def print_figures(name: str, rounds: list[dict[str, Any]]) -> None:
    for unit in ("decode", "returning"):
        print(f"{name}, a {unit} row:", end="")
        for part in PARTS:
            values = [one[unit][part] for one in rounds]
            print(
                f" {part} {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f}),", end=""
            )
        print(f" µs; {statistics.median(one[unit]['bytes'] for one in rounds):,.0f} bytes pickled")
    step = rounds[-1]["step"]
    print(
        f"{name}, a step: runner {step['runner']:,.0f} µs, {step['launches']:.0f} launches of kernels",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--decodes", type=int, default=512, help="rows in a step (default 512)")
    parser.add_argument("--returning", type=int, default=20, help="of them come back (default 20)")
    parser.add_argument("--tokens", type=int, default=2_000, help="of each row (default 2,000)")
    parser.add_argument("--steps", type=int, default=60, help="of each kind in a round (default 60)")
    parser.add_argument("--rounds", type=int, default=5, help="of each way to stage tokens (default 5)")
    parser.add_argument("--profile", action="store_true", help="also print where steps spend their time")
    parser.add_argument("--json", type=Path, help="also write the figures as JSON")
    arguments = parser.parse_args()
    num_rows = arguments.decodes + 3 * arguments.returning
    with host_runner(num_slots=num_rows, max_model_len=arguments.tokens + _MOST_OUTPUTS) as runner:
        steps = Steps(runner, num_rows=num_rows, num_tokens=arguments.tokens)
        staging = runner.req_states.all_token_ids
        ways: dict[str, Any] = {"list": [], "array": staging._staged_write_contents}
        assert isinstance(ways["array"], array), "PipeMax's worker stages tokens as an array"
        gc.collect()
        gc.freeze()  # as vLLM does in its workers
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
        for _ in range(arguments.rounds):
            for name, contents in ways.items():
                staging._staged_write_contents = contents
                found[name].append(
                    measure_round(steps, arguments.decodes, arguments.returning, arguments.steps)
                )
        for name, rounds in found.items():
            print_figures(name, rounds)
        if arguments.profile:
            for line, share in profile(steps, arguments.returning, seconds=20.0):
                print(f"{share:6.1%} {line}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") != "1":
        command = [sys.executable, "-m", "lab.bench.worker_step", *sys.argv[1:]]
        os.execve(sys.executable, command, runner_environment())
    logging.disable(logging.WARNING)
    sys.exit(main())
