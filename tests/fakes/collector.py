"""A collector that keeps what servers report, with the token that came along."""

import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from pyarrow import flight

from pipemax.wire import COLLECTOR_ACTION_STATS, CollectorAddress, JobOutlook, ServerStats


class _Authorization(flight.ServerMiddleware):
    def __init__(self, value: str) -> None:
        self.value = value


class _AuthorizationFactory(flight.ServerMiddlewareFactory):
    def start_call(self, info: Any, headers: dict[str, list[str]]) -> _Authorization:
        return _Authorization("".join(headers.get("authorization", [])))


class FakeCollector(flight.FlightServerBase):
    """Listens on a free port of the loopback. ``with`` it."""

    def __init__(self) -> None:
        super().__init__("grpc+tcp://127.0.0.1:0", middleware={"auth": _AuthorizationFactory()})
        self._lock = threading.Lock()
        self._reports: list[ServerStats] = []
        self._authorizations: set[str] = set()
        self.stalls_s: list[float] = []
        """How long the next calls take, one each. What they brought is lost if their sender gives up meanwhile."""
        self.outlook: JobOutlook | None = None
        """The answer to all reports."""

    def address(self, token: str) -> CollectorAddress:
        return CollectorAddress(host="127.0.0.1", port=self.port, token=token)

    @property
    def reports(self) -> list[ServerStats]:
        with self._lock:
            return list(self._reports)

    @property
    def authorizations(self) -> set[str]:
        with self._lock:
            return set(self._authorizations)

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> Iterator[bytes]:
        assert action.type == COLLECTOR_ACTION_STATS
        with self._lock:
            stall_s = self.stalls_s.pop(0) if self.stalls_s else 0.0
        if stall_s:
            time.sleep(stall_s)
            if context.is_cancelled():
                return iter(())
        with self._lock:
            self._reports.append(ServerStats.from_bytes(action.body.to_pybytes()))
            self._authorizations.add(context.get_middleware("auth").value)
        return iter([self.outlook.to_bytes()] if self.outlook is not None else [])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
