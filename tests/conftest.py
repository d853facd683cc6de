"""Hypothesis without deadlines: machines are shared, and no test here is about time."""

from hypothesis import settings

settings.register_profile("pipemax", deadline=None)
settings.load_profile("pipemax")
