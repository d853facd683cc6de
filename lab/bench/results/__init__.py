"""The tables of results: PipeMax against the best-tuned stock vLLM, in simulation (``python -m lab.bench.results``)."""
