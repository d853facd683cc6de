"""Fetch Iceberg's own REST catalog server, a fixture of its tests: called by ``make test-versions``.

tools/make_rest_catalog.py DIRECTORY: its jars, for
``java -cp 'DIRECTORY/*' org.apache.iceberg.rest.RESTCatalogServer``. Safe to run again.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pyspark
from configure_spark import IVY_SETTINGS, SQLITE_PACKAGE

_ICEBERG, _JETTY = "1.11.0", "12.1.14"
_PACKAGES = (
    f"org.apache.iceberg:iceberg-core:{_ICEBERG}::tests",
    f"org.apache.iceberg:iceberg-open-api:{_ICEBERG}:test-fixtures",
    f"org.eclipse.jetty.ee10:jetty-ee10-servlet:{_JETTY}",
    f"org.eclipse.jetty.compression:jetty-compression-server:{_JETTY}",
    f"org.eclipse.jetty.compression:jetty-compression-gzip:{_JETTY}",
    f"org.apache.iceberg:iceberg-aws:{_ICEBERG}",
    f"org.apache.iceberg:iceberg-aws-bundle:{_ICEBERG}",
    "dev.failsafe:failsafe:3.3.2",
    SQLITE_PACKAGE,
)
"""``group:name:version`` and the classifiers of its jars, an empty one for the jar without: none means that jar alone.

Spark's ``--packages`` takes no classifiers, so Ivy is called itself.
"""


def main() -> None:
    """Make the directory, if it is not complete."""
    directory = Path(sys.argv[1])
    ready, packages = directory / "ready", "\n".join(_PACKAGES)
    if ready.exists() and ready.read_text() == packages:
        return
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "ivysettings.xml").write_text(IVY_SETTINGS)
    (directory / "ivy.xml").write_text(_ivy_file())
    of_spark = Path(pyspark.__file__).parent / "jars"
    (ivy,) = of_spark.glob("ivy-*.jar")
    command = ["java", "-jar", ivy, "-settings", directory / "ivysettings.xml", "-ivy", directory / "ivy.xml"]
    command += ["-cache", directory / "cache", "-retrieve"]
    command += [f"{directory}/[artifact]-[revision](-[classifier]).[ext]"]
    subprocess.run(command, check=True)
    for name in ("hadoop-client-*.jar", "log4j-*.jar", "jcl-over-*.jar"):
        for jar in of_spark.glob(name):
            shutil.copy(jar, directory)
    ready.write_text(packages)


def _ivy_file() -> str:
    dependencies = []
    for package in _PACKAGES:
        group, name, version, *classifiers = package.split(":")
        jars = "".join(
            f'<artifact name="{name}" type="jar"' + (f' m:classifier="{one}"/>' if one else "/>")
            for one in classifiers
        )
        dependencies.append(
            f'<dependency org="{group}" name="{name}" rev="{version}" conf="default->default">{jars}</dependency>'
        )
    return (
        '<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven"><info organisation="pipemax" '
        f'module="rest-catalog"/><configurations><conf name="default"/></configurations><dependencies>'
        f"{''.join(dependencies)}</dependencies></ivy-module>"
    )


if __name__ == "__main__":
    main()
