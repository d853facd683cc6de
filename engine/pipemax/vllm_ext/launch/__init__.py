"""Prepare a vLLM that can start from an EngineConfig: arguments, environment, and the step times it begins with."""
