"""PipeMax beside what else one would take for a Spark table of prompts; ``python -m bench.peers --help``."""
