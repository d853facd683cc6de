"""The fleet part of ``pipemax plan-capacity``: its options, how they are read, and how its figures are told."""

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pipemax.policy.capacity import CapacityOption
    from pipemax.policy.fleet import FleetRun, FleetSettings

_START_UP, _COMMIT_EVERY = "10m", "15m"
_UNIT_HOURS = {"d": 24.0, "h": 1.0, "m": 1 / 60, "s": 1 / 3600}

_FLEET_PANEL = "Fleet (one of --nodes, --done-by, --budget)"

FleetNodes = Annotated[
    int | None,
    typer.Option(
        "--nodes", min=1, rich_help_panel=_FLEET_PANEL, help="Nodes of a fleet: gives its hours and cost."
    ),
]
DoneBy = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        rich_help_panel=_FLEET_PANEL,
        help="When a fleet must be done: 8h, 1h30m, a local time (07:30) or date and time (2026-11-25T07:30). "
        "Gives the fewest nodes and their cost.",
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        rich_help_panel=_FLEET_PANEL,
        help="What a fleet may cost. Gives the most nodes that it pays for, and their hours.",
    ),
]
StartUp = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        rich_help_panel=_FLEET_PANEL,
        help="From the order of a fleet's node, or of its replacement, to its first step, with the model's load and "
        "the calibration (10m unless said).",
    ),
]
SpeedSpread = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        rich_help_panel=_FLEET_PANEL,
        help="Coefficient of variation of the nodes' speeds: 0.1 is 10% (0 unless said).",
    ),
]
LostPerHour = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        rich_help_panel=_FLEET_PANEL,
        help="How often a node is lost, per node and hour, as spot nodes are (0 unless said).",
    ),
]
CommitEvery = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        rich_help_panel=_FLEET_PANEL,
        help="The job's --commit-every, which sizes its chunks (15m unless said).",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetQuestion:
    """What of a fleet is given: exactly one of the three. The others are asked for."""

    nodes: int | None
    within_hours: float | None
    budget: float | None
    settings: "FleetSettings"

    def answer(self, rows: int, option: "CapacityOption", price_per_hour: float) -> "FleetRun":
        """Predict the fleet of nodes that run ``option``. ``ValueError`` if no fleet can be so."""
        from pipemax.policy.fleet import fewest_nodes, most_nodes, run_fleet

        if self.nodes is not None:
            return run_fleet(rows, self.nodes, option.work, self.settings)
        if self.within_hours is not None:
            return fewest_nodes(rows, option.work, self.settings, within_hours=self.within_hours)
        assert self.budget is not None
        return most_nodes(rows, option.work, self.settings, price_per_hour=price_per_hour, budget=self.budget)


def fleet_question(
    *,
    nodes: int | None,
    done_by: str | None,
    budget: float | None,
    start_up: str | None,
    speed_spread: float | None,
    lost_per_hour: float | None,
    commit_every: str | None,
    seed: int,
    prices: list[float],
    now: datetime,
) -> FleetQuestion | None:
    """Return what is asked of a fleet; None if nothing is. ``ValueError`` names options that do not go together."""
    given = {"--nodes": nodes, "--done-by": done_by, "--budget": budget}
    named = [name for name, value in given.items() if value is not None]
    details = {
        "--start-up": start_up,
        "--speed-spread": speed_spread,
        "--lost-per-hour": lost_per_hour,
        "--commit-every": commit_every,
    }
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)}: give one, and the command tells the others")
    if not named:
        if alone := [name for name, value in details.items() if value is not None]:
            raise ValueError(f"{alone[0]} is of a fleet: give --nodes, --done-by or --budget, too")
        return None
    if budget is not None and 0 in prices:
        raise ValueError("--budget says nothing of nodes that cost nothing: give a --price above 0")
    from pipemax.policy.fleet import FleetSettings

    return FleetQuestion(
        nodes=nodes,
        within_hours=None if done_by is None else hours_until(done_by, now),
        budget=budget,
        settings=FleetSettings(
            start_up_s=3600 * read_hours(start_up or _START_UP, "--start-up"),
            speed_spread=speed_spread or 0.0,
            lost_per_hour=lost_per_hour or 0.0,
            commit_every_s=3600 * read_hours(commit_every or _COMMIT_EVERY, "--commit-every"),
            seed=seed,
        ),
    )


def read_hours(text: str, option: str) -> float:
    """Read a duration as 8h, 90m, 1h30m or 2d. ``ValueError`` names the option."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([dhms])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{option} {text}: write a duration as 8h, 90m or 1h30m")
    return sum(float(number) * _UNIT_HOURS[unit] for number, unit in parts)


def hours_until(text: str, now: datetime) -> float:
    """Return the hours that a duration has, or those from ``now`` to a local time; one without a date is the next.

    ``ValueError`` if the text is neither, or the time is past.
    """
    try:
        hours = read_hours(text, "--done-by")
    except ValueError:
        hours = (_moment(text, now) - now) / timedelta(hours=1)
    if hours <= 0:
        raise ValueError(f"--done-by {text} is past")
    return hours


def _moment(text: str, now: datetime) -> datetime:
    if match := re.fullmatch(r"(\d{1,2}):(\d{2})", text):
        hour, minute = int(match[1]), int(match[2])
        if hour < 24 and minute < 60:
            today = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
            return today if today > now else today + timedelta(days=1)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"--done-by {text}: write a duration (8h), a time (07:30) or a date and time (2026-11-25T07:30)"
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=now.tzinfo)


def fleet_lines(run: "FleetRun", question: FleetQuestion, node: str, price_per_hour: float) -> list[str]:
    """Return what the terminal says of a fleet."""
    settings = question.settings
    lines = [
        f"fleet: {run.nodes:,} {'nodes' if run.nodes > 1 else 'node'} of {node}, {run.hours:,.2f} hours, "
        f"cost {_cost(run, price_per_hour):,.0f}; of the nodes' hours {run.start_up_share:.1%} are start-up and "
        f"{run.uneven_share:.1%} the drain, uneven ends and losses"
    ]
    if settings.is_random:
        lines.append(
            f"fleet: {run.least_hours:,.2f} to {run.most_hours:,.2f} hours over the draws; {run.lost_nodes:,.1f} nodes "
            f"lost, {run.rows_again:,.0f} rows computed again"
        )
    lines.append(
        f"fleet: with {settings.start_up_s / 60:g} minutes of start-up, commits every "
        f"{settings.commit_every_s / 60:g} minutes, speeds that vary by {settings.speed_spread:.0%}, and "
        f"{settings.lost_per_hour:g} losses per node and hour"
    )
    return lines


def fleet_json(run: "FleetRun", question: FleetQuestion, price_per_hour: float) -> dict[str, Any]:
    """Return the object ``fleet`` of the option that is chosen."""
    settings = question.settings
    return {
        "nodes": run.nodes,
        "hours": round(run.hours, 4),
        "least_hours": round(run.least_hours, 4),
        "most_hours": round(run.most_hours, 4),
        "cost": round(_cost(run, price_per_hour), 4),
        "start_up_share": round(run.start_up_share, 4),
        "uneven_share": round(run.uneven_share, 4),
        "lost_nodes": run.lost_nodes,
        "rows_again": round(run.rows_again),
        "start_up_s": settings.start_up_s,
        "commit_every_s": settings.commit_every_s,
        "speed_spread": settings.speed_spread,
        "lost_per_hour": settings.lost_per_hour,
    }


def _cost(run: "FleetRun", price_per_hour: float) -> float:
    return run.hours * run.nodes * price_per_hour
