"""Tuning of a stock engine while it runs: how many tokens a step takes, and how many rows run at once."""
