"""From an EngineConfig to a vLLM that can start: arguments, environment, and the step times it begins with."""
