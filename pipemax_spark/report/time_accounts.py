"""Account for the engines' time during one job, from the servers' reports.

An engine's account runs since its start (``TimeAccount``). If an engine is older than the job, its time before its
first report does not count; but if the job began while the engine started, the rest of that start counts.
"""

from collections import defaultdict
from collections.abc import Mapping

from pipemax.wire import ServerStats

_PREFIX, _SUFFIX = "time_", "_s"
START_UP = "start_up"
"""The part of an account in which the engine started."""
_DRAIN_AT_FULL_RATE = "drain_at_full_rate_s"
_TOLERANCE_S = 1.0
NO_ENGINE = "no_engine"
"""The job's time without an engine: Spark's own start, and the last commit."""


class TimeAccounts:
    """One job's accounts. Not thread-safe: the owner lets in one thread at a time."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, int], Mapping[str, float]] = {}
        self._latest: dict[tuple[str, int], Mapping[str, float]] = {}
        self._drains: dict[tuple[str, int], tuple[float, float]] = {}
        """Engine → its drains' seconds at its full rate: at its first report, and at its latest."""

    def add(self, stats: ServerStats, *, job_age_s: float) -> None:
        account = _account_of(stats)
        if not account:
            return
        engine = (stats.server_id, stats.engine_starts)
        if engine not in self._latest:
            self._before[engine] = _before_job(account, job_age_s)
        self._latest[engine] = account
        drain_s = stats.engine_metrics.get(_DRAIN_AT_FULL_RATE)
        if drain_s is not None:
            # If the job began while the engine started, all of its drains belong to the job.
            began_before = bool(self._before[engine].keys() - {START_UP}) and engine not in self._drains
            before_s = drain_s if began_before else self._drains.get(engine, (0.0, 0.0))[0]
            self._drains[engine] = (before_s, drain_s)

    def drain_at_full_rate_s(self) -> float | None:
        """Return how long the engines' drains would have taken at the rate before them; None if none tells it."""
        if not self._drains:
            return None
        return sum(max(0.0, latest_s - before_s) for before_s, latest_s in self._drains.values())

    def num_servers(self) -> int:
        """Return how many servers' engines have accounts, also those that have done no rows."""
        return len({server for server, _ in self._latest})

    def total(self) -> dict[str, float]:
        """Return seconds by part, over all engines."""
        total: defaultdict[str, float] = defaultdict(float)
        for engine, account in self._latest.items():
            for part, seconds in account.items():
                total[part] += max(0.0, seconds - self._before[engine].get(part, 0.0))
        return dict(total)


def whole_account(account: Mapping[str, float], *, engines: int, seconds: float) -> dict[str, float]:
    """Add time without an engine, so that the parts add up to ``seconds`` for each engine."""
    rest_s = engines * seconds - sum(account.values())
    return {**account, NO_ENGINE: max(0.0, rest_s)} if account else {}


def working_seconds(account: Mapping[str, float], *, seconds: float) -> float:
    """Return ``seconds`` without the engines' start and the time without an engine, as a mean over the engines.

    Without an account, or if there is nothing else in it, these are all of the seconds.
    """
    total = sum(account.values())
    working = total - account.get(START_UP, 0.0) - account.get(NO_ENGINE, 0.0)
    return seconds * working / total if working > 0 else seconds


def describe_account(account: Mapping[str, float]) -> str:
    """Describe the shares of an account, leaving out parts under half a percent.

    For instance: ``start-up 31%, prefill 20%, decode 49% of 62.1 s``.
    """
    total = sum(account.values())
    shares = [
        f"{part.replace('_', ' ').replace('start up', 'start-up')} {seconds / total:.0%}"
        for part, seconds in account.items()
        if seconds >= total / 200
    ]
    return f"{', '.join(shares)} of {total:,.1f} s"


def _before_job(account: Mapping[str, float], job_age_s: float) -> Mapping[str, float]:
    """Return the part of an engine's first account that belongs to the time before the job."""
    older_s = sum(account.values()) - job_age_s
    if older_s <= _TOLERANCE_S:
        return {}
    # An engine's time begins with its start.
    return {START_UP: older_s} if older_s < account.get(START_UP, 0.0) else account


def _account_of(stats: ServerStats) -> dict[str, float]:
    return {
        name.removeprefix(_PREFIX).removesuffix(_SUFFIX): seconds
        for name, seconds in stats.engine_metrics.items()
        if name.startswith(_PREFIX) and name.endswith(_SUFFIX)
    }
