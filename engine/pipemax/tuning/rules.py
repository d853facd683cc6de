"""How long a tuning may take, and what it takes to be believed."""

from dataclasses import dataclass

from pipemax.domain.step_records import StepLimits
from pipemax.tuning.blocks import BlockPlan
from pipemax.tuning.step_fit import StepFit
from pipemax.tuning.table import Envelope, Lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningRules:
    """Seconds are those of the table's steps; gains are logarithms of ratios of rates."""

    max_s: float = 900.0
    """Of the table, for sweep, race and check together; while the model waits for rows, the engine runs as it began."""
    max_share: float = 0.05
    """Of the table's expected seconds."""
    max_wait_share: float = 0.2
    """Of the table's expected seconds, by which enough rows must have ended to know their lengths."""
    least_table_s: float = 1200.0
    """A shorter table runs under the limits it starts with."""
    sweep_setting_s: float = 3.5
    block_s: float = 20.0
    residences: float = 2.5
    """A block of other running rows lasts as many times as a row runs…"""
    fewest_residences: float = 1.5
    """…and so many where the budget has no time for one pair of such blocks."""
    fewest_pairs: int = 4
    """Rivals for which the budget has fewer are not raced. If that is true of all, the best has as many at most…"""
    large_share: float = 0.2
    """…and where a large gain is predicted, within this share of the table's expected seconds."""
    large: float = 0.02
    max_rivals: int = 3
    near_best: float = 0.02
    """Rivals are those predicted within this of the best."""
    worth: float = 0.015
    """A predicted gain below this ends the tuning with the default."""
    worth_errors: float = 2.0
    """It must also exceed this many times the error of the fitted step times."""

    def budget_s(self, table_s: float, *, is_large: bool = False) -> float:
        """Return the seconds that a tuning may take, of a table that is expected to take ``table_s``."""
        return min(self.max_s, (self.large_share if is_large else self.max_share) * table_s)

    def block(
        self,
        limits: tuple[StepLimits, ...],
        *,
        residence_s: float | None,
        is_changed: bool,
        is_brief: bool = False,
    ) -> BlockPlan:
        """Return the plan of a block of the race. Nothing is washed out where no limits change.

        ``residence_s``: how long a row runs, where another number of rows will run; otherwise ``None``.
        """
        total_s, washout_s = self.block_s, self.block_s / 3
        if residence_s is not None:
            total_s = max(total_s, (self.fewest_residences if is_brief else self.residences) * residence_s)
            washout_s = max(total_s / 3, min(residence_s, total_s / 2))
        return BlockPlan(
            limits=limits,
            washout_s=washout_s if is_changed else 0.0,
            measured_s=total_s - washout_s,
        )


def residence_s(
    fit: StepFit | None, envelope: Envelope, lengths: Lengths, limits: StepLimits
) -> float | None:
    """Return how long a row runs, if rows run under one of these limits and the default that do not under the other.

    Without a fit, or before rows ended, a block is as short as one of other steps.
    """
    if fit is None or not len(lengths):
        return None
    room = envelope.rows_that_fit(lengths)
    rows, usual = min(limits.running_rows, room), min(envelope.default.running_rows, room)
    if rows == usual:
        return None
    rows = max(rows, usual)
    step_s = fit.stage.decode_time.seconds(round(rows), round(rows * lengths.mean_kv))
    prompts = round(rows * lengths.prompts_per_output)
    step_s += fit.stage.prefill_time.added_batch_s(round(rows), prompts)
    return step_s * lengths.mean_output
