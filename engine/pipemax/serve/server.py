"""Run the Flight service: check headers, serve sessions, and answer health, stats and shutdown."""

import itertools
import logging
import time
from collections.abc import Iterator
from dataclasses import replace

from pyarrow import flight

from pipemax.checkpoint.model_tasks import check_tasks
from pipemax.endpoint_config import EndpointConfig, parse_config
from pipemax.serve.collector_reports import Reporter
from pipemax.serve.engine_host import EngineFactory, EngineHost
from pipemax.serve.flight_session import ClientGoneError, Session, SessionFailedError, SessionTerms, refuse
from pipemax.serve.flow.credit import CreditWindow
from pipemax.serve.flow.open_input import InputWatch
from pipemax.serve.gpu_locks import GpuLocks
from pipemax.serve.job_stats import StatsBook
from pipemax.serve.lifecycle import EXIT_ENGINE_DIED, Exit, Lifecycle
from pipemax.serve.limits import Timings, WindowLimits
from pipemax.serve.membership import Refused
from pipemax.serve.metrics import MetricsEndpoint
from pipemax.serve.rows.equal_requests import EqualRequests
from pipemax.serve.rows.journal import Journal
from pipemax.serve.rows.result_cache import ResultCache
from pipemax.serve.rows.turns import Turns
from pipemax.serve.sessions import EngineSessions
from pipemax.wire import (
    COMPLETION_SCHEMA,
    PACKAGE_VERSION,
    VERSION_METADATA,
    WIRE_VERSION,
    JobStats,
    ServerAction,
    ServerStats,
    SessionErrorCode,
    SessionHeader,
)

log = logging.getLogger(__name__)


class EngineServer(flight.FlightServerBase):  # type: ignore[misc,unused-ignore]  # pyarrow is untyped
    """The engine server; listens once it is constructed. ``stop`` refuses all sessions and has the engine close."""

    def __init__(
        self,
        socket_path: str,
        *,
        engine_factory: EngineFactory,
        lifecycle: Lifecycle,
        journal: Journal,
        timings: Timings,
        limits: WindowLimits,
        gpus: GpuLocks,
    ) -> None:
        self._lifecycle = lifecycle
        self._stats = StatsBook()
        self._window = CreditWindow(limits)
        self._equals = EqualRequests(ResultCache(limits.cache_bytes))
        self._turns = Turns(journal)
        self._numbers = itertools.count(1)
        inputs = InputWatch(self._stats.received)
        self._sessions = EngineSessions(
            window=self._window,
            turns=self._turns,
            equals=self._equals,
            inputs=inputs,
            stats=self._stats,
            lifecycle=lifecycle,
        )
        self._host = EngineHost(engine_factory, self._sessions, timings, gpus)
        self._reporter = Reporter(
            self._stats.collectors,
            lambda collector: self._snapshot(self._stats.jobs(collector)),
            inputs.hear,
            period_s=timings.stats_push_s,
            timeout_s=timings.stats_timeout_s,
        )
        self._metrics = MetricsEndpoint(lambda: self._snapshot(self._stats.jobs()))
        # Last: calls may arrive as soon as the base class is initialized.
        super().__init__(f"grpc+unix://{socket_path}")
        self._host.start()
        self._reporter.start()

    @property
    def is_loading(self) -> bool:
        return self._host.stats().state == "loading"

    def stop(self, cause: Exit, *, notice_s: float) -> None:
        """Refuse all sessions, have the engine close, and give clients and collectors this long to hear of it."""
        self._turns.close(in_order=cause.status != EXIT_ENGINE_DIED)
        self._host.stop(Refused(code=SessionErrorCode.SHUTTING_DOWN, detail=cause.reason))
        self._sessions.wake_all()
        deadline_s = time.monotonic() + notice_s
        while self._lifecycle.num_open_sessions and time.monotonic() < deadline_s:
            time.sleep(0.02)
        self._reporter.stop()
        self._metrics.close()

    def wait_until_closed(self, timeout_s: float) -> bool:
        """Wait, after ``stop``, until the engine has closed. Return ``False`` if it takes longer than this."""
        return self._host.wait_until_closed(timeout_s)

    # Flight's calls; each runs on its own thread.

    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """Serve one session; see ``pipemax.wire`` for the protocol."""
        writer.begin(COMPLETION_SCHEMA.with_metadata(VERSION_METADATA))
        try:
            terms = check_header(next(self._numbers), descriptor.command)
            self._refuse_useless_engine(terms.header.job_id)
        except SessionFailedError as failure:
            log.warning("a session was refused: %s", failure.detail)
            refuse(failure, reader, writer)
            return
        self._run_session(terms, context, reader, writer)

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> Iterator[flight.Result]:
        match action.type:
            case ServerAction.HEALTH:
                yield flight.Result(self._snapshot({}).to_bytes())
            case ServerAction.STATS:
                yield flight.Result(self._snapshot(self._stats.jobs()).to_bytes())
            case ServerAction.SHUTDOWN:
                yield flight.Result(self._snapshot({}).to_bytes())
                self._lifecycle.stop(Exit(reason="told to shut down"))
            case unknown:
                raise flight.FlightServerError(f"unknown action {unknown!r}")

    def list_actions(self, context: flight.ServerCallContext) -> list[tuple[str, str]]:
        return [(str(action), "takes nothing, answers a ServerStats") for action in ServerAction]

    def _run_session(
        self,
        terms: SessionTerms,
        context: flight.ServerCallContext,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        header = terms.header
        if terms.config.metrics_port is not None:
            self._metrics.serve(terms.config.metrics_port)
        self._lifecycle.open_session(header.daemon)
        self._stats.open_session(header.job_id, header.collector)
        session = Session(
            terms,
            host=self._host,
            credit=self._window.open_stream(),
            stats=self._stats,
            turns=self._turns,
            equals=self._equals if header.reuses_results else None,
            sessions=self._sessions,
            context=context,
            reader=reader,
            writer=writer,
        )
        self._sessions.open(terms.number, header.job_id, session)
        log.info("session %d opened: job %s, %s", terms.number, header.job_id, header.task)
        outcome = "broke off"
        try:
            session.run()
            outcome = "ended"
        except SessionFailedError as failure:
            outcome = f"failed: {failure.detail}"
        except ClientGoneError as gone:
            outcome = f"lost its client: {str(gone).partition('.')[0]}"
        finally:
            self._sessions.close(terms.number, header.job_id)
            # Do this before the call returns and the client sees the end, because the totals must be exact by then.
            collector = self._stats.close_session(header.job_id)
            if collector is not None:
                self._reporter.report_now(collector, is_last=True)
            self._lifecycle.close_session()
            log.info("session %d %s", terms.number, outcome)

    def _snapshot(self, jobs: dict[str, JobStats]) -> ServerStats:
        stats = self._host.stats()
        return replace(
            stats,
            open_sessions=self._sessions.num_open,
            window_rows=self._window.rows if stats.state == "ready" else 0,
            tuning=self._sessions.tuning.note,
            metrics_port=self._metrics.port,
            jobs=jobs,
        )

    def _refuse_useless_engine(self, job_id: str) -> None:
        reason = self._turns.join(job_id)
        if reason is not None:
            raise SessionFailedError(SessionErrorCode.ENGINE_UNUSABLE, reason)


def check_header(number: int, text: bytes) -> SessionTerms:
    """Return the terms of a session. Raise ``SessionFailedError``, with the remedy, for a wrong header."""
    wire_version, package_version = SessionHeader.versions_of(text)
    if (wire_version, package_version) != (WIRE_VERSION, PACKAGE_VERSION):
        raise SessionFailedError(
            SessionErrorCode.VERSION_MISMATCH,
            f"the Spark side has pipemax-spark {package_version} (wire {wire_version}), the engine's environment "
            f"has {PACKAGE_VERSION} (wire {WIRE_VERSION}): install the same version in both, then start a new "
            "Spark application.",
        )
    try:
        header = SessionHeader.from_bytes(text)
    except ValueError as error:
        raise SessionFailedError(SessionErrorCode.INVALID_HEADER, str(error)) from None
    try:
        config = parse_config(header.engine)
        if isinstance(config, EndpointConfig):
            config = config.with_keys(header.keys)
    except ValueError as error:
        raise SessionFailedError(SessionErrorCode.INVALID_ENGINE_CONFIG, f"engine config: {error}") from None
    try:
        sampling = header.generation.sampling()
        questions = tuple(question.sampling() for question in header.questions)
        check_tasks(config, (sampling, *questions))
    except (ValueError, TypeError) as error:
        raise SessionFailedError(SessionErrorCode.INVALID_GENERATION, str(error)) from None
    return SessionTerms(number=number, header=header, config=config, sampling=sampling, questions=questions)
