"""vLLM's scheduler under PipeMax's plans, and its records of blocks, slots and prefixes."""
