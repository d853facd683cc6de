"""vLLM's scheduler under PipeMax's plans, and the books it keeps of blocks, slots and prefixes."""
