"""Prove a stage's copies on the machine at hand: known bytes through every lane, and poison under every prefetch."""
