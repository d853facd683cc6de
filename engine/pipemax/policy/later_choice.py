"""Chooses the batching of an engine at work, once its first rows have shown how long outputs are.

The size of mixed steps depends on the mean output length, which nobody knows before a table's first rows have ended.
So ``batching: auto`` begins in phases, waits for the outputs of the rows that were sent first, simulates, and has the
engine mix if that is faster. It simulates in a process of its own, so that the engine does not wait for it.
"""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence

from pipemax.config import BatchingChoice, RowLengths
from pipemax.control.decision_trace import decode, encode
from pipemax.domain.plan import Batching
from pipemax.generation import Completion
from pipemax.policy.measured_choice import BatchingPlan
from pipemax.policy.row_sample import choose_batching_for
from pipemax.sim.measured_engine import MeasuredEngine

log = logging.getLogger(__name__)

COHORT_ROWS = 256
"""Rows whose outputs are waited for: the standard error of their mean is about a fifteenth of it."""
_FEWEST_TABLE_ROWS = 20 * COHORT_ROWS
"""A shorter table is not worth a simulation, which takes half a minute of a core. Of a table of unknown length, half as
many rows must have ended."""
_NICENESS = 10
_SIMULATOR = (sys.executable, "-m", __name__)


class OutputCohort:
    """The outputs of the rows that were sent first. Those that end first are the short ones, so all are waited for."""

    def __init__(self, size: int = COHORT_ROWS) -> None:
        self._size = size
        self._under_way: set[str] = set()
        self._num_sent = 0
        self._ended: list[Completion] = []

    def sent(self, request_id: str) -> None:
        if self._num_sent < self._size:
            self._num_sent += 1
            self._under_way.add(request_id)

    def ended(self, completions: Iterable[Completion]) -> None:
        """Count these outputs. Rows with errors say nothing, and are replaced by later ones."""
        for completion in completions:
            if completion.request_id in self._under_way:
                self._under_way.remove(completion.request_id)
                if completion.error is None and completion.finish_reason != "abort":
                    self._ended.append(completion)
                else:
                    self._num_sent -= 1

    def aborted(self, request_ids: Iterable[str]) -> None:
        for request_id in self._under_way.intersection(request_ids):
            self._under_way.remove(request_id)
            self._num_sent -= 1

    def lengths(self, sampled: RowLengths | None) -> RowLengths | None:
        """Return what the rows showed, with what else was ``sampled`` of the table; None while rows are under way."""
        if len(self._ended) < self._size:
            return None
        outputs = [completion.completion_tokens for completion in self._ended]
        known = {
            "prompt_tokens": [completion.prompt_tokens for completion in self._ended],
            "max_tokens": max(1, *outputs),
        }
        lengths = sampled or RowLengths.model_validate(known)
        mean_tokens = max(1.0, sum(outputs) / len(outputs))
        return lengths.model_copy(update={"mean_output_tokens": mean_tokens})


def is_worth_learning(lengths: RowLengths | None, batching: BatchingChoice) -> bool:
    """Return whether an engine that begins in phases should learn how long outputs are, and choose again."""
    if batching is not BatchingChoice.AUTO:
        return False
    if lengths is None:
        return True
    is_long = lengths.rows is None or lengths.rows >= _FEWEST_TABLE_ROWS
    return lengths.mean_output_tokens is None and is_long


class LaterChoice:
    """Watches an engine's rows, and has it mix prompts into decode steps if that turns out to be faster.

    The engine's thread calls ``sent``, ``ended`` and ``aborted``, in which nothing takes time.
    """

    def __init__(
        self,
        engine: MeasuredEngine,
        sampled: RowLengths | None,
        mix: Callable[[int], None],
        *,
        mixed_step_tokens: int | None = None,
        cohort_rows: int = COHORT_ROWS,
    ) -> None:
        """``mixed_step_tokens`` is that of the engine config: the only size of mixed steps to simulate."""
        self._engine = engine
        self._mixed_step_tokens = mixed_step_tokens
        self._sampled = sampled
        self._mix = mix
        self._cohort: OutputCohort | None = OutputCohort(cohort_rows)
        knows_rows = sampled is not None and sampled.rows is not None
        self._rows_to_wait = 0 if knows_rows else _FEWEST_TABLE_ROWS // 2
        self._process: subprocess.Popen[bytes] | None = None
        self._waits: threading.Thread | None = None
        self._is_closed = False

    def sent(self, request_id: str) -> None:
        if self._cohort is not None:
            self._cohort.sent(request_id)

    def aborted(self, request_ids: Iterable[str]) -> None:
        if self._cohort is not None:
            self._cohort.aborted(request_ids)

    def ended(self, completions: Sequence[Completion]) -> None:
        if self._cohort is None:
            return
        self._cohort.ended(completions)
        self._rows_to_wait -= len(completions)
        if self._rows_to_wait > 0:
            return
        if (lengths := self._cohort.lengths(self._sampled)) is None:
            return
        self._cohort = None
        self._waits = threading.Thread(
            target=self._choose, args=(lengths,), name="batching-choice", daemon=True
        )
        self._waits.start()

    def close(self) -> None:
        """End what is being simulated."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()
        if self._waits is not None:
            self._waits.join()

    def _choose(self, lengths: RowLengths) -> None:
        learned = f"outputs have {lengths.mean_output_tokens:,.0f} tokens on average"
        try:
            plan = self._simulate(lengths)
        except (OSError, RuntimeError, ValueError) as error:
            if not self._is_closed:
                log.warning(
                    "%s, but the batching could not be simulated, so PipeMax stays in phases: %s",
                    learned,
                    error,
                )
            return
        others = "" if plan.other_tokens_per_s is None else f", {plan.other_tokens_per_s:,.0f} the other way"
        rates = f"simulated {plan.tokens_per_s:,.0f} tokens/s{others}"
        if plan.batching is Batching.MIXED and plan.mixed_step_tokens is not None:
            self._mix(plan.mixed_step_tokens)
            log.info("batching: %s, so from now on %s: %s", learned, plan.description, rates)
        else:
            log.info("batching: %s, and PipeMax stays in phases: %s", learned, rates)

    def _simulate(self, lengths: RowLengths) -> BatchingPlan:
        """Return the best plan. ``RuntimeError`` with what the process said if it failed."""
        # The path of modules is not always in the environment: a notebook may have added to it.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = self._process = subprocess.Popen(
            _SIMULATOR, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        )
        if self._is_closed:
            process.kill()
        task = {
            "engine": encode(self._engine),
            "lengths": lengths.model_dump(mode="json"),
            "mixed_step_tokens": self._mixed_step_tokens,
        }
        answer, said = process.communicate(json.dumps(task).encode())
        if process.returncode:
            raise RuntimeError(said.decode(errors="replace").strip()[-500:] or f"status {process.returncode}")
        plan: BatchingPlan = decode(BatchingPlan, json.loads(answer))
        return plan


def main() -> None:
    """Simulate what standard input says, and write the plan to standard output."""
    os.nice(_NICENESS)
    task = json.load(sys.stdin)
    engine, lengths = decode(MeasuredEngine, task["engine"]), RowLengths.model_validate(task["lengths"])
    plan = choose_batching_for(engine, lengths, BatchingChoice.AUTO, task["mixed_step_tokens"])
    json.dump(encode(plan), sys.stdout)


if __name__ == "__main__":
    main()
