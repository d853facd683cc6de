"""PipeMax on Spark: annotate tables with large language models, one engine per executor.

Importing this package loads nothing heavy: no torch, no vLLM, and pyspark only where it is used. The functions are
loaded when they are first asked for, because Spark's tasks import this package too.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pipemax import __version__ as __version__

if TYPE_CHECKING:
    from pipemax_spark.engines.stop import stop_engines as stop_engines
    from pipemax_spark.functions.ready import pm_classify as pm_classify
    from pipemax_spark.functions.ready import pm_extract as pm_extract
    from pipemax_spark.functions.ready import register_functions as register_functions
    from pipemax_spark.functions.udf import pipemax_udf as pipemax_udf
    from pipemax_spark.functions.udf import register as register
    from pipemax_spark.table import annotate_table as annotate_table
    from pipemax_spark.table import compare_prompts as compare_prompts
    from pipemax_spark.transform import annotate as annotate

_MODULES = {
    "annotate": "transform",
    "annotate_table": "table",
    "compare_prompts": "table",
    "pipemax_udf": "functions.udf",
    "pm_classify": "functions.ready",
    "pm_extract": "functions.ready",
    "register": "functions.udf",
    "register_functions": "functions.ready",
    "stop_engines": "engines.stop",
}
"""The functions that users call, and their modules."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
