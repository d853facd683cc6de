"""Fetch Iceberg's own REST catalog server, a fixture of its tests: called by ``make test-versions``.

tools/make_rest_catalog.py DIRECTORY: its jars, for
``java -cp 'DIRECTORY/*' org.apache.iceberg.rest.RESTCatalogServer``. Safe to run again.
"""

import shutil
import sys
import urllib.request
from pathlib import Path

import pyspark
from configure_spark import SQLITE_PACKAGE, resolve_jars

_ICEBERG, _JETTY = "1.11.0", "12.1.14"
_PACKAGES = (
    f"org.apache.iceberg:iceberg-core:{_ICEBERG}",
    f"org.eclipse.jetty.ee10:jetty-ee10-servlet:{_JETTY}",
    f"org.eclipse.jetty.compression:jetty-compression-server:{_JETTY}",
    f"org.eclipse.jetty.compression:jetty-compression-gzip:{_JETTY}",
    SQLITE_PACKAGE,
)
_MAVEN = "https://repo1.maven.org/maven2/org/apache/iceberg"
_TESTS = (
    f"iceberg-open-api/{_ICEBERG}/iceberg-open-api-{_ICEBERG}-test-fixtures.jar",
    f"iceberg-core/{_ICEBERG}/iceberg-core-{_ICEBERG}-tests.jar",
)
"""They have no class path of their own, so Spark does not resolve them."""


def main() -> None:
    """Make the directory, if it is not complete."""
    directory = Path(sys.argv[1])
    if (directory / "ready").exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    jars = resolve_jars(_PACKAGES, directory / "ivy")
    of_spark = Path(pyspark.__file__).parent / "jars"
    jars += [
        *of_spark.glob("hadoop-client-*.jar"),
        *of_spark.glob("log4j-*.jar"),
        *of_spark.glob("jcl-over-*.jar"),
    ]
    for jar in jars:
        shutil.copy(jar, directory)
    for path in _TESTS:
        with urllib.request.urlopen(f"{_MAVEN}/{path}") as answer:
            (directory / path.rpartition("/")[2]).write_bytes(answer.read())
    (directory / "ready").touch()


if __name__ == "__main__":
    main()
