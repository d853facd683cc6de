"""One trial: the tuner drives a simulated engine that scatters, from the first row until it settles.

What comes after is not simulated step by step: the rest of the table is taken at the true rate of the chosen limits.
"""

from dataclasses import dataclass

from lab.tuning.live_engine import LiveEngine, Noise
from lab.tuning.settings import Setting
from lab.tuning.truth import Truth, useful_work_s
from pipemax.domain.step_records import StepLimits
from pipemax.tuning.tuned import Tuned
from pipemax.tuning.tuner import Start, Tuner

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a tuner did on a table of some hours."""

    tuned: Tuned
    seconds: float
    """Of the table until the tuner settled."""
    rows: float
    """Done by then, by their work."""
    faults: int


def run_trial(
    setting: Setting, truth: Truth, *, hours: float, seed: int, start: Start | None = None
) -> Trial:
    """Run the tuner on a table that takes ``hours`` under the default."""
    table_s = hours * HOUR_S
    # More rows than a tuning takes need not be there: it may try for 15 minutes, and wait for long rows before.
    rows = round(1.6 * truth.rows_per_s * min(table_s, 1000.0)) + 5000
    envelope = setting.envelope()
    tuner = Tuner(envelope, start=start)
    first = envelope.default if start is None else start.limits
    engine = LiveEngine(setting.scenario(rows, seed), first, Noise().scatter(seed))
    work_s = 0.0
    while tuner.tuned is None:
        if not engine.num_left:
            raise RuntimeError(f"{setting.name}, seed {seed}: the tuner has not settled, and no row is left")
        steps, ended = engine.advance(1.0)
        work_s += useful_work_s(truth.costs, steps)
        (limits,) = tuner.observe([steps], ended, expected_s=max(0.0, table_s - engine.now_s))
        engine.set_limits(limits)
    work_s -= engine.recomputed_tokens * truth.costs.prompt_token_s
    return Trial(
        tuned=tuner.tuned, seconds=engine.now_s, rows=work_s / truth.row_work_s, faults=len(tuner.faults)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Regret:
    """What a trial cost; shares of the time that the best limits of the grid take."""

    settled: float
    total: float
    below_default_s: float
    """Seconds by which the table takes longer than under the default from the first row to the last."""


def regret_of(trial: Trial, *, table_rows: float, best: float, default: float, chosen: float) -> Regret:
    """Return the regret by true rates, in rows per second, of the best, default and chosen limits."""
    table_s = trial.seconds + (table_rows - trial.rows) / chosen
    return Regret(
        settled=1 - chosen / best,
        total=table_s / (table_rows / best) - 1,
        below_default_s=table_s - table_rows / default,
    )


def as_pair(limits: StepLimits) -> tuple[int, int]:
    return limits.step_tokens, limits.running_rows
