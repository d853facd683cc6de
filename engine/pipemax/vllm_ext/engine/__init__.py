"""The engine's own process: the thread that steps vLLM, admission and statistics."""
