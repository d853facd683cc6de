"""The process of one replica: an engine driven by messages from the parent's process.

It ends with the parent, and the engine's own processes end with it (``pipemax.node.lifetime``), however it ends. What
it prints goes to the parent's log.
"""

import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipemax.config import EngineConfig
from pipemax.domain.errors import EngineDiedError, EngineStartError
from pipemax.engine import Engine, EngineStats
from pipemax.node.lifetime import SERVER_IDENTITY_VARIABLE, end_with_server
from pipemax.node.process import ProcessIdentity
from pipemax.replicas.messages import (
    Abort,
    Died,
    Ended,
    Failed,
    FromReplica,
    InputOpen,
    NothingToMeasure,
    Report,
    SetLimits,
    Start,
    Started,
    Steps,
    Stop,
    Submit,
    TakeSteps,
    line_of,
    lines_of,
    read_line,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFactory:
    """How a replica makes its engine."""

    measures: Callable[[EngineConfig], bool]
    """Whether an engine of this config would check and measure the machine when it starts."""
    start: Callable[[EngineConfig], tuple[Engine, dict[str, Any]]]
    """Returns a started engine, and its ``PolicyChoice`` as plain values."""


log = logging.getLogger(__name__)

_POLL_S = 0.05
_REPORT_PERIOD_S = 0.05


def main(
    arguments: Sequence[str] | None = None, *, load_factory: Callable[[], EngineFactory] | None = None
) -> None:
    """Run a replica over the socket whose descriptor is the only argument. Never returns."""
    (descriptor,) = sys.argv[1:] if arguments is None else arguments
    connection = socket.socket(fileno=int(descriptor))
    os.set_inheritable(connection.fileno(), False)
    try:
        status = _run(connection, load_factory or _real_engine)
    except BaseException:
        logging.exception("the replica failed")
        status = 1
    logging.shutdown()
    os._exit(status)  # vLLM's threads may not end


def _real_engine() -> EngineFactory:
    # vLLM takes ten seconds to import: only now, on the replica's own cores.
    from pipemax.policy.start import start_engine
    from pipemax.vllm_ext.launch.forecast import measures_at_start

    def start(config: EngineConfig) -> tuple[Engine, dict[str, Any]]:
        started = start_engine(config)
        return started.engine, asdict(started.choice)

    return EngineFactory(measures=measures_at_start, start=start)


def _run(connection: socket.socket, load_factory: Callable[[], EngineFactory]) -> int:
    lines = lines_of(connection)
    start = read_line(next(lines))
    assert isinstance(start, Start), start
    if start.cores:
        os.sched_setaffinity(0, start.cores)
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname)s replica {start.number} %(name)s: %(message)s",
    )
    end_with_server()
    os.environ[SERVER_IDENTITY_VARIABLE] = str(ProcessIdentity.of_this_process())
    try:
        factory, config = load_factory(), EngineConfig.parse(start.config)
        if start.asks_whether_it_measures and not factory.measures(config):
            _send(connection, NothingToMeasure())
        engine, policy = factory.start(config)
    except (EngineStartError, EngineDiedError) as error:
        _send(connection, Failed(reason=str(error)))
        return 1
    except Exception as error:
        log.exception("the engine's start raised an unexpected error")
        _send(connection, Failed(reason=f"the engine did not start: {error!r}"))
        return 1
    replica = _Replica(connection, engine)
    ceiling, limits = (next(iter(of_all), None) for of_all in (engine.most_limits(), engine.limits()))
    facts = engine.tuning_facts()
    _send(connection, Started(policy=policy, most_limits=ceiling, limits=limits, tuning=facts))
    return replica.run(lines)


class _Replica:
    def __init__(self, connection: socket.socket, engine: Engine) -> None:
        self._connection = connection
        self._engine = engine
        self._heard = 0
        self._is_told_to_stop = False
        self._is_asked_for_steps = False
        self._fault: EngineDiedError | None = None

    def run(self, lines: Iterator[bytes]) -> int:
        """Serve until told to stop. Return the process's exit status."""
        # Hears on a thread of its own: taking rows in means to tokenize them, and completions must not wait for it.
        threading.Thread(target=self._hear, args=(lines,), name="hearing", daemon=True).start()
        try:
            self._deliver()
        except EngineDiedError as error:
            _send(self._connection, Died(reason=str(error), is_machine_fault=error.is_machine_fault))
            return 1
        self._engine.close()
        return 0

    def _deliver(self) -> None:
        reported_s = -math.inf
        while not self._is_told_to_stop:
            ended = self._engine.poll(_POLL_S)
            if self._fault is not None:
                raise self._fault
            if ended:
                _send(self._connection, Ended(completions=tuple(ended)))
            if time.monotonic() - reported_s >= _REPORT_PERIOD_S:
                reported_s = time.monotonic()
                heard = self._heard  # read before the credit, which then counts at least these rows
                credit_tokens = self._engine.admission_credit_tokens()
                stats = finite(self._engine.stats())
                _send(self._connection, Report(stats=stats, credit_tokens=credit_tokens, heard=heard))
            if self._is_asked_for_steps:
                self._is_asked_for_steps = False
                for records in self._engine.take_step_records():
                    _send(self._connection, Steps(records=records.to_plain()))

    def _hear(self, lines: Iterator[bytes]) -> None:
        try:
            for line in lines:
                match message := read_line(line):
                    case Submit():
                        self._engine.submit(message.requests)
                        self._heard = message.number
                    case Abort():
                        self._engine.abort(message.request_ids)
                    case InputOpen():
                        self._engine.set_input_open(message.is_open)
                    case SetLimits():
                        self._engine.set_limits([message.limits])
                    case TakeSteps():
                        self._is_asked_for_steps = True
                    case Stop() | Start():
                        break
        except EngineDiedError as error:
            self._fault = error
        except Exception as error:
            log.exception("a message could not be carried out")
            self._fault = EngineDiedError(f"the replica could not carry out a message: {error!r}")
        else:
            self._is_told_to_stop = True  # or the parent has gone without a word


def finite(stats: EngineStats) -> EngineStats:
    """Return the statistics without figures that are infinite or no numbers."""
    metrics = {name: value for name, value in stats.metrics.items() if math.isfinite(value)}
    return replace(stats, metrics=metrics)


def _send(connection: socket.socket, message: FromReplica) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # the parent is gone, and this process ends with it
        connection.sendall(line_of(message))
