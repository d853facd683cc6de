"""How well the tuner of a running engine does, in simulation: ``python -m lab.tuning``."""
