"""PipeMax: an offline LLM engine that keeps the KV cache of inactive batches in host memory.

Importing this package loads nothing heavy: no torch, no vLLM, no pyarrow. It knows nothing of Spark.
"""

__version__ = "0.1.0"
