"""The turns of ``lab/bench/spark_overhead.py``, and what a turn must be to count: computed, and possible.

An engine server answers a request that it has answered before from its cache. A run that does not compute its rows
measures that cache; so the engine's own count of output tokens must be that of the run's answers.
"""

from collections import Counter
from dataclasses import dataclass

from pyarrow import flight

from pipemax.wire import ProcessIdentity, ServerAction, ServerStats
from pipemax_spark.executor.server_process import Executor, ServerFiles, connect, files_of_all_servers

MOST_RATIO = 1.5
"""Spark's path feeds the same engine, so it cannot be faster. A machine that changes its speed between two runs gave
up to 1.21 (lab/results/spark_overhead.md)."""
_TOLERANCE = 0.001
"""Share of a run's tokens by which the engine's count may differ."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One pass over the table, or its first rows."""

    seconds: float
    tokens: int
    """Output tokens of its answers."""
    texts: Counter[str | None]
    computed_tokens: int = 0
    """Output tokens that the engine counted meanwhile."""
    busy_cpu_s: float = 0.0
    """Busy time of all cores, whoever used them: the machine should do nothing else."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One run of each path."""

    bare: Run
    spark: Run

    @property
    def ratio(self) -> float:
        return self.spark.tokens_per_s / self.bare.tokens_per_s


def check_turn(turn: Turn) -> None:
    """Raise ``ValueError`` if a run's engine did not compute its answers, or the ratio cannot be."""
    for name, run in (("the bare engine's", turn.bare), ("Spark's", turn.spark)):
        if abs(run.computed_tokens - run.tokens) > _TOLERANCE * run.tokens:
            raise ValueError(
                f"in {name} run the engine computed {run.computed_tokens:,} output tokens, and the answers have "
                f"{run.tokens:,}: the run measures something else, such as a cache of answers"
            )
    if turn.ratio > MOST_RATIO:
        raise ValueError(
            f"Spark's run was {turn.ratio:.2f} times as fast as the bare engine's ({turn.spark.seconds:.1f} s and "
            f"{turn.bare.seconds:.1f} s), and it cannot be faster: something slowed the bare engine down"
        )


def tokens_computed_below(jvm_pid: int) -> int:
    """Return the output tokens that the engines of a JVM's servers have counted since their start."""
    executor = Executor(process=ProcessIdentity.of(jvm_pid), daemon=ProcessIdentity.of_this_process())
    return sum(_output_tokens(files) for files in files_of_all_servers(executor))


def _output_tokens(files: ServerFiles) -> int:
    with connect(files) as client:
        (answer,) = client.do_action(
            flight.Action(ServerAction.STATS, b""), flight.FlightCallOptions(timeout=5)
        )
    return int(ServerStats.from_bytes(answer.body.to_pybytes()).engine_metrics["output_tokens"])
