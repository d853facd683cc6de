"""PipeMax compared with other ways to process a Spark table of prompts; ``python -m lab.bench.peers --help``."""
