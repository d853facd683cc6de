"""PipeMax on Spark: annotate tables with large language models, one engine per executor.

Importing this package loads nothing heavy: no torch, no vLLM, and pyspark only where it is used.
"""

from pipemax import __version__ as __version__
