"""How long the cells that are left will take, by those that were run."""

from collections.abc import Iterable, Sequence
from functools import cache

from lab.bench.results.cells import Cell, System
from lab.bench.results.settings import Setting
from lab.bench.results.store import Store
from pipemax.presets import load_workload

_SECONDS_PER_MILLION = {
    System.STOCK: 1.0,
    System.BALANCED: 1.0,
    System.PIPEMAX: 16.0,
    System.CHOICE: 2.3,
}
"""CPU seconds for a million tokens of a table, before any cell was run: measured for two RTX 5090s and ShareGPT on
2026-11-27. Tables of long outputs take several times as long."""


class Remaining:
    """Expects each cell to take its share of tokens, at the rate of the system's cells so far."""

    def __init__(self, first: Sequence[Cell], done: Store, *, num_jobs: int) -> None:
        """``first`` are the cells before PipeMax's, of which there is at least one for each drawing of a table."""
        self._store = done
        self._num_jobs = num_jobs
        self._spent_s = dict.fromkeys(System, 0.0)
        self._spent_tokens = dict.fromkeys(System, 0.0)
        self._left: dict[System, float] = dict.fromkeys(System, 0.0)
        for system in (System.STOCK, System.BALANCED, System.CHOICE):
            self.know(system, [cell for cell in first if cell.system is system])
        tables = {(cell.setting, cell.seed) for cell in first if cell.system is System.STOCK}
        self._left[System.PIPEMAX] = sum(_millions(setting) for setting, _ in tables)

    def know(self, system: System, cells: Iterable[Cell]) -> None:
        """Take these as all cells of the system, some of which are done."""
        self._left[system] = self._spent_s[system] = self._spent_tokens[system] = 0.0
        for cell in cells:
            if cell in self._store:
                self._spend(cell, self._store[cell]["cpu_s"])
            else:
                self._left[system] += _millions(cell.setting)

    def expected_s(self, cell: Cell) -> float:
        """Return the seconds that a cell should take."""
        return self._rate(cell.system) * _millions(cell.setting)

    def done(self, cell: Cell, seconds: float) -> None:
        self._spend(cell, seconds)
        self._left[cell.system] -= _millions(cell.setting)

    def _spend(self, cell: Cell, seconds: float) -> None:
        self._spent_s[cell.system] += seconds
        self._spent_tokens[cell.system] += _millions(cell.setting)

    def _rate(self, system: System) -> float:
        if not self._spent_tokens[system]:
            return _SECONDS_PER_MILLION[system]
        return self._spent_s[system] / self._spent_tokens[system]

    def __str__(self) -> str:
        left_s = sum(max(0.0, self._left[system]) * self._rate(system) for system in System)
        minutes = left_s / self._num_jobs / 60
        return f"{minutes:.0f} minutes left with {self._num_jobs} jobs"


@cache
def _millions(setting: Setting) -> float:
    """Return a table's tokens, in millions, by its profile's means."""
    profile = load_workload(setting.workload)
    return setting.rows * (profile.prompt.mean + profile.output.mean) / 1e6
