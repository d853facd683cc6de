"""Chooses the policy of an engine: draws rows from what is known of the table, and compares simulations of both."""
