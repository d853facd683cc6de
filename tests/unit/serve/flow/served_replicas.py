"""Replicas around the fake engine that answer rows without end, and tune themselves meanwhile."""

import time
from collections.abc import Callable
from typing import Any

from pipemax.api import Completion, GenerationRequest, Sampling
from pipemax.config import EngineConfig
from pipemax.replicas.replica_set import ReplicaSet
from pipemax.serve.flow.live_tuning import LiveTuning
from pipemax.tuning.canary import CanaryRules
from pipemax.tuning.rules import TuningRules
from tests.fakes.settings import expected_text

CONFIG = EngineConfig(model="fake", replicas=2)
IN_FLIGHT = 100
FASTER = 5.0
"""The tuning's clock runs as many times faster."""


class OneJob:
    def __init__(self) -> None:
        self.has: frozenset[str] = frozenset()

    def jobs(self) -> frozenset[str]:
        return frozenset({"job"})

    def share_left(self) -> int:
        return 1_000_000

    def traits(self) -> frozenset[str]:
        return self.has


class Served:
    """An engine, its rows and its tuning."""

    def __init__(
        self, engine: ReplicaSet, config: EngineConfig = CONFIG, rules: TuningRules | None = None
    ) -> None:
        self.engine, self._config, self._rules, self.job = engine, config, rules, OneJob()
        self.rows: dict[int, Completion] = {}
        self._sent = 0
        self.begin()

    def begin(self) -> None:
        """As for another job."""
        canary = CanaryRules(pairs=2, block_s=FASTER)
        self.tuning = LiveTuning(self.job, lambda: FASTER * time.monotonic(), self._rules, canary)

    def run_until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline_s, (self.tuning.note, self.engine.stats().replicas)
            self.step()

    def step(self) -> None:
        """Send as many rows as have ended, and take those that end."""
        if count := IN_FLIGHT - (self._sent - len(self.rows)):
            self.submit(count)
        ended = self.engine.poll(0.05)
        for row in ended:
            assert self.rows.setdefault(int(row.request_id), row) is row, "each row comes once"
        self.tuning.learn(ended)
        self.tuning.see(self.engine, self._config)

    def submit(self, count: int, **sampling: Any) -> None:
        numbers = range(self._sent, self._sent + count)
        self.engine.submit(
            [
                GenerationRequest(request_id=f"{n}", prompt=f"prompt {n}", sampling=Sampling(**sampling))
                for n in numbers
            ]
        )
        self._sent += count

    def finish(self) -> None:
        """Take the rows that are left, and expect the answer of each."""
        while len(self.rows) < self._sent:
            for row in self.engine.poll(0.05):
                assert self.rows.setdefault(int(row.request_id), row) is row, "each row comes once"
        assert {n: row.text for n, row in self.rows.items()} == {
            n: expected_text(f"prompt {n}") for n in range(self._sent)
        }
