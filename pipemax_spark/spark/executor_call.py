"""Call a Python function on one executor, through a Spark job of one task.

It works in every session, also over Spark Connect, where the driver is on another machine. This call is the first to
run this package's Python code on an executor, so it also reports whether the package is there.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pipemax.wire import PACKAGE_VERSION
from pipemax_spark.errors import JobError

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession


def call_on_executor(
    spark: "SparkSession", function: Callable[[], Any], *, profile: "ResourceProfile | None" = None
) -> Any:
    """Call the function there and return its result, a JSON value. Spark pickles the function with its arguments.

    ``profile`` is the resource profile of the executor. Raise ``JobError`` if the executors' Python lacks this package,
    or has another version of it.
    """
    from pyspark.errors import PySparkException

    version = PACKAGE_VERSION

    def call(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            yield pa.RecordBatch.from_pydict({"answer": [_answer(function, version)]})

    one_row = spark.range(0, 1, 1, 1)
    try:
        answer = one_row.mapInArrow(call, "answer string", profile=profile).collect()[0]["answer"]
    except PySparkException as error:
        if missing := re.search(r"ModuleNotFoundError: No module named '(pipemax\w*)", str(error)):
            raise JobError(
                f"the Python of Spark's tasks has no module {missing[1]!r}; install pipemax-spark {PACKAGE_VERSION} "
                "on every node of the cluster, in the environment that its PYSPARK_PYTHON names"
            ) from error
        raise
    reply = json.loads(answer)
    if reply["version"] != PACKAGE_VERSION:
        raise JobError(
            f"the Python of Spark's tasks has pipemax-spark {reply['version']}, this side has {PACKAGE_VERSION}; "
            "install the same version in both"
        )
    return reply["returned"]


def _answer(function: Callable[[], Any], version: str) -> str:
    """Return the call's result as JSON, or only the version if it differs from the caller's."""
    returned = function() if version == PACKAGE_VERSION else None
    return json.dumps({"version": PACKAGE_VERSION, "returned": returned})
