"""What a row asks of a model, ask by ask: samples, attempts, choices, thinking. It knows neither vLLM nor Spark."""
