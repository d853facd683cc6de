"""Step times measured on a running engine, at an engine's start or by ``pipemax check-node``."""
