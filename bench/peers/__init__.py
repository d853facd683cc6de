"""PipeMax compared with other ways to process a Spark table of prompts; ``python -m bench.peers --help``."""
