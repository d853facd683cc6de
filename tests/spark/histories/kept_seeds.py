"""Seeds of histories that have ever failed, each with what was found: the nightly plays them first."""

KEPT_SEEDS: dict[int, str] = {}
