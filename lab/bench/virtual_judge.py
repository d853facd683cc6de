"""Judge a run of ``virtual_overhead.py`` from outside: engines' counters, and processes' memory and CPU time."""

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import psutil

FIRST_SHARE, LAST_SHARE = 0.1, 0.9
RUN_VARIABLE = "LC_SPARK_OVERHEAD_RUN"
"""In the environment of every process of a run and of no other; engine servers inherit what begins with ``LC_``."""
KINDS = {
    "engine core": "VLLM::EngineCore",
    "engine server": "pipemax.serve",
    "bare engine": "--child bare",
    "executor JVM": "CoarseGrainedExecutorBackend",
    "tasks' Python": "pyspark.daemon",
    "driver JVM": "org.apache.spark.deploy.SparkSubmit",
    "driver Python": "--child spark",
}
"""Kind of process → a part of its command line."""


@dataclass(slots=True)
class Series:
    """One engine's counters over time."""

    at_s: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    """Without any request."""

    def add(self, at_s: float, metrics: dict[str, float]) -> None:
        self.at_s.append(at_s)
        self.tokens.append(metrics.get("output_tokens", 0.0))
        self.waited_s.append(metrics.get("time_waiting_for_input_s", 0.0))


@dataclass(frozen=True, kw_only=True)
class Sustained:
    """The part of a run between the shares of the tokens that the module names."""

    begin_s: float
    end_s: float
    tokens_per_s: float
    busy: float


def sustained(engines: list[Series]) -> Sustained:
    """Judge the engines' counters. ``ValueError`` if a counter has fewer than two values."""
    if not engines or any(len(series.at_s) < 2 for series in engines):
        raise ValueError("the run is too short: an engine was heard fewer than twice")
    at_s = np.unique(np.concatenate([series.at_s for series in engines]))
    made = sum(np.interp(at_s, series.at_s, series.tokens) for series in engines)
    begin_s, end_s = (float(np.interp(share * made[-1], made, at_s)) for share in (FIRST_SHARE, LAST_SHARE))
    waited_s = [float(np.diff(np.interp([begin_s, end_s], s.at_s, s.waited_s))[0]) for s in engines]
    return Sustained(
        begin_s=begin_s,
        end_s=end_s,
        tokens_per_s=float((LAST_SHARE - FIRST_SHARE) * made[-1] / (end_s - begin_s)),
        busy=1 - sum(waited_s) / len(engines) / (end_s - begin_s),
    )


@dataclass(slots=True)
class Watch:
    """Memory and CPU time of a run's processes by kind, sampled until stopped."""

    run: str
    at_s: list[float] = field(default_factory=list)
    mib: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    cpu_s: dict[tuple[str, int], float] = field(default_factory=dict)
    stopped: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        while not self.stopped.wait(2.0):
            total = dict.fromkeys(KINDS, 0.0)
            for process in psutil.process_iter():
                try:
                    command = " ".join(process.cmdline())
                    kind = next((kind for kind, part in KINDS.items() if part in command), None)
                    # vLLM writes its process titles over the environment; the parent is a server or a bare engine.
                    owner = process.parent() if kind == "engine core" else process
                    if kind and owner and owner.environ().get(RUN_VARIABLE) == self.run:
                        total[kind] += process.memory_info().rss / 2**20
                        self.cpu_s[kind, process.pid] = sum(process.cpu_times()[:2])
                except psutil.Error:
                    continue  # it has ended meanwhile
            self.at_s.append(time.time())
            for kind, mib in total.items():
                self.mib[kind].append(mib)

    def growth(self, during: Sustained) -> dict[str, float]:
        """Return the last third's median over the first's. ``ValueError`` if the part is too short to say."""
        places = [i for i, at_s in enumerate(self.at_s) if during.begin_s <= at_s <= during.end_s]
        third = len(places) // 3
        if not third:
            raise ValueError(f"the run is too short to say anything of memory: {len(places)} samples")
        firsts, lasts = places[:third], places[-third:]
        return {
            kind: round(median(mib[i] for i in lasts) / median(mib[i] for i in firsts), 3)
            for kind, mib in self.mib.items()
            if median(mib[i] for i in firsts)
        }

    def cpu_ms_per_row(self, rows: int) -> dict[str, float]:
        total: dict[str, float] = defaultdict(float)
        for (kind, _), seconds in self.cpu_s.items():
            total[kind] += seconds
        return {kind: round(1e3 * seconds / rows, 3) for kind, seconds in total.items()}
