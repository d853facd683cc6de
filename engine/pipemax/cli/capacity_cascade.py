"""``pipemax plan-capacity --cascade``: the hours and the cost of a table of which a small model keeps a share."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from pipemax.cli.common import ROWS_PANEL

_EXAMPLE = "--kept-share 0.42:0.55:0.63"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptShare:
    """The share of rows that keep the small answer: 80 % of tables are between ``low`` and ``high``."""

    low: float
    middle: float
    high: float


def kept_share(text: str) -> KeptShare:
    """Return the shares of ``LOW:MIDDLE:HIGH``. Raise ``BadParameter`` for others."""
    try:
        low, middle, high = (float(part) for part in text.split(":"))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not LOW:MIDDLE:HIGH, such as {_EXAMPLE}") from None
    if not 0 <= low <= middle <= high <= 1:
        raise typer.BadParameter(f"{text!r} must be three shares from 0 to 1, none less than the one before")
    return KeptShare(low=low, middle=middle, high=high)


Small = Annotated[
    Path | None,
    typer.Option(
        "--cascade",
        metavar="FILE",
        rich_help_panel=ROWS_PANEL,
        help="Engine config of a small model that answers all rows first, as in pipemax annotate. With --kept-share.",
    ),
]
Kept = Annotated[
    KeptShare | None,
    typer.Option(
        "--kept-share",
        parser=kept_share,
        metavar="LOW:MIDDLE:HIGH",
        rich_help_panel=ROWS_PANEL,
        help="Share of the rows that keep the small answer, as pipemax annotate --cascade --dry-run forecasts it.",
    ),
]


def small_model(path: Path | None, kept: KeptShare | None) -> str | None:
    """Return the model of the engine config. ``ValueError`` says what is missing; None without a cascade."""
    import yaml

    if (path is None) != (kept is None):
        raise ValueError(
            f"--cascade and --kept-share go together: pipemax annotate --cascade --dry-run prints {_EXAMPLE}"
        )
    if path is None:
        return None
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict) or not isinstance(config.get("model"), str):
        raise ValueError(f"{path} names no model; give the small model's engine config")
    if "endpoint" in config:
        raise ValueError(f"{path} names an endpoint, whose speed is not simulated; give an engine's config")
    return str(config["model"])


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeHours:
    """A cascade on one kind of node, by the chosen layout of each model."""

    models: tuple[str, str]
    """The small one and the large one."""
    small_hours: float
    """Of all rows, as those of the large model."""
    large_hours: float
    kept: KeptShare
    price_per_hour: float | None

    def hours(self, kept: float) -> float:
        """Return the hours where this share of the rows keeps the small answer, without the engines' starts."""
        return self.small_hours + (1 - kept) * self.large_hours

    def sentence(self, rows: int) -> str:
        small, large = self.models
        rest = f"{1 - self.kept.middle:.0%} of them ({1 - self.kept.high:.0%} to {1 - self.kept.low:.0%})"
        pays = "" if self.hours(self.kept.middle) < self.large_hours else ". It does not pay"
        return (
            f"cascade: {small} answers {rows:,} rows in {self.small_hours:,.1f} hours, then {large} {rest}: "
            f"{self._interval(self.hours, ',.1f')} hours{self._cost()}, in place of {self.large_hours:,.1f}{pays}"
        )

    def facts(self) -> dict[str, Any]:
        """Return the figures for ``--json``."""
        shares = {"low": self.kept.high, "middle": self.kept.middle, "high": self.kept.low}
        hours = {name: round(self.hours(share), 4) for name, share in shares.items()}
        price = self.price_per_hour
        cost = None if price is None else {name: round(price * value, 4) for name, value in hours.items()}
        return {
            "small_hours": round(self.small_hours, 4),
            "large_hours": round(self.large_hours, 4),
            "hours": hours,
            "cost": cost,
        }

    def _cost(self) -> str:
        price = self.price_per_hour
        if price is None:
            return ""
        return f" for {self._interval(lambda kept: price * self.hours(kept), ',.0f')}"

    def _interval(self, of: Callable[[float], float], form: str) -> str:
        kept = self.kept
        return f"{of(kept.middle):{form}} ({of(kept.high):{form}} to {of(kept.low):{form}})"
