"""Step times measured on a running engine, by the engine itself or by ``pipemax calibrate``."""
