"""Warn where the result of ``annotate()`` is limited, because the engine is asked for more rows than are returned."""

import warnings
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_LIMITING = ("limit", "take", "head", "first", "show")


def warn_of_limits(annotated: "DataFrame", of: "DataFrame") -> "DataFrame":
    """Return ``annotated``, whose limiting methods warn unless ``of``, the input, has a known number of rows.

    Spark knows how many rows there are at most where the input itself is limited. Frames that are made from the result
    do not warn, nor does Spark Connect, where a plan does not say how many rows it has.
    """
    if hasattr(of, "_jdf"):
        for name in _LIMITING:
            setattr(annotated, name, _warning(getattr(annotated, name), name, of))
    return annotated


def _warning(method: Callable[..., Any], name: str, of: "DataFrame") -> Callable[..., Any]:
    @wraps(method)
    def warned(*args: Any, **options: Any) -> Any:
        if of._jdf.queryExecution().optimizedPlan().maxRows().isEmpty():
            warnings.warn(
                f"{name}() after annotate() does not limit what the engine is asked: Spark may have it answer whole "
                "partitions for a few rows. Limit the input instead: annotate(df.limit(5), …)",
                stacklevel=2,
            )
        return method(*args, **options)

    return warned
