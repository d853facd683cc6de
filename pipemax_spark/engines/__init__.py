"""Engines seen from the driver: checked, found, stopped."""
