"""Warn of a driver that no engine's report reaches, for instance because of a firewall."""

from collections.abc import Callable

from pipemax_spark.report.collector import Collector

_SILENT_AFTER_S = 60.0
"""Engine servers report every second from their start on, even while they load."""


class SilenceWatch:
    """Warns once if tasks run and no engine's report reaches the driver."""

    def __init__(
        self,
        collector: Collector,
        *,
        running_tasks: Callable[[], int],
        warn: Callable[[str], None],
        now_s: float,
        silent_after_s: float = _SILENT_AFTER_S,
    ) -> None:
        self._collector = collector
        self._running_tasks = running_tasks
        self._warn = warn
        self._silent_after_s = silent_after_s
        self._since_s = now_s
        self._is_over = False

    def look(self, now_s: float) -> None:
        """Check for silence; call this about every second."""
        if self._is_over:
            return
        silent_s = min(self._collector.silent_s(), now_s - self._since_s)
        if not self._running_tasks():
            self._since_s = now_s
        elif silent_s > self._silent_after_s:
            self._is_over = True
            address = self._collector.address
            self._warn(
                f"tasks are running, but no engine's report has reached the driver at {address.host}:{address.port} "
                f"for {self._silent_after_s:.0f} s: a firewall probably blocks that port. Give --collector-port a "
                "port that executors can reach. Until then no progress is shown, and error limits are checked at "
                "each commit"
            )
