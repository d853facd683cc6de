"""A Spark session with Delta, or one clear sentence about what is missing."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from pipemax_spark.errors import JobError

# Spark release -> the Delta package made for it.
DELTA_PACKAGES = {
    "4.0": "io.delta:delta-spark_2.13:4.0.1",
    "4.1": "io.delta:delta-spark_4.1_2.13:4.3.1",
    "4.2": "io.delta:delta-spark_4.2_2.13:4.4.0",
}


def get_session(app_name: str) -> Any:
    """The running session, or a new one: ``local[*]`` where no master is set. ``JobError`` without Java or Delta."""
    try:
        import pyspark
        from pyspark.sql import SparkSession
    except ImportError:
        raise JobError(
            "pyspark is not installed in this Python; run `pip install 'pipemax-spark[spark]'`"
        ) from None
    if (running := SparkSession.getActiveSession()) is not None:
        return running
    is_submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    if not is_submitted:
        _check_java()
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    package = DELTA_PACKAGES.get(".".join(pyspark.__version__.split(".")[:2]))
    builder = (
        SparkSession.builder.appName(app_name)
        .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
        .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
    )
    if not is_submitted and package is not None and not _has_delta_configured():
        builder = builder.config("spark.jars.packages", package)
    session = builder.getOrCreate()
    _check_delta(session, package)
    return session


def _check_java() -> None:
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else "java"
    if shutil.which(java) is None:
        raise JobError(f"Spark needs Java 17 and {java!r} was not found; install a JRE or set JAVA_HOME")


def _has_delta_configured() -> bool:
    import pyspark

    spark_home = Path(os.environ.get("SPARK_HOME", Path(pyspark.__file__).parent))
    defaults = Path(os.environ.get("SPARK_CONF_DIR", spark_home / "conf")) / "spark-defaults.conf"
    has_setting = defaults.is_file() and "delta-spark" in defaults.read_text()
    return has_setting or any((spark_home / "jars").glob("delta-spark*.jar"))


def _check_delta(session: Any, package: str | None) -> None:
    loader = session._jvm.Thread.currentThread().getContextClassLoader()
    try:
        loader.loadClass("io.delta.sql.DeltaSparkSessionExtension")
    except Exception as error:  # py4j wraps the ClassNotFoundException
        flag = f"--packages {package}" if package else "the Delta package for this Spark release"
        raise JobError(
            f"Delta is not on Spark {session.version}'s class path; start the job with: spark-submit {flag} …"
        ) from error
