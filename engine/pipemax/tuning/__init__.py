"""Tunes an engine on the rows that it answers: pure decisions, from records of steps."""
