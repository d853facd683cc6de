"""Configure the pyspark of this environment to work out of the box: Delta on its class path, its log in a file.

Writes three files into pyspark's own ``conf`` folder and replaces ``bin/spark-submit`` with a wrapper that needs no
variable set. Spark itself resolves the jars, once, into the environment, so that removing the environment removes them
too. Run by ``make setup``; with
``--iceberg`` by ``make test-versions``, which also tests Iceberg where a release of it is made for this Spark.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pyspark

from pipemax_spark.spark.session import DELTA_PACKAGES

DELTA_PACKAGE = DELTA_PACKAGES[".".join(pyspark.__version__.split(".")[:2])]
"""The Delta release for this pyspark."""

ICEBERG_PACKAGES = {
    "4.0": "org.apache.iceberg:iceberg-spark-runtime-4.0_2.13:1.11.0",
    "4.1": "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0",
}
"""Spark release → the Iceberg release made for it, which the tests use."""
DELTA_EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
ICEBERG_EXTENSION = "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"
SQLITE_PACKAGE = "org.xerial:sqlite-jdbc:3.46.1.3"
"""For the tests with Iceberg's JDBC catalog."""

# One resolver: with Spark's defaults, every look-up that another repository would answer prints an error page.
IVY_SETTINGS = """<ivysettings>
  <settings defaultResolver="central"/>
  <resolvers><ibiblio name="central" m2compatible="true"/></resolvers>
</ivysettings>
"""

LOG4J = """# Written by tools/configure_spark.py: Spark's log goes to a file, so that a job's report stays readable.
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = ${env:PIPEMAX_LOG_DIR:-logs}/spark.log
appender.file.filePattern = ${env:PIPEMAX_LOG_DIR:-logs}/spark.log.%i
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = 64MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 1
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{yyyy-MM-dd HH:mm:ss} %p %c{1}: %m%n%ex
"""


def main() -> None:
    environment = Path(sys.prefix)
    spark_home = Path(pyspark.__file__).parent
    packages, extensions = [DELTA_PACKAGE], [DELTA_EXTENSION]
    iceberg = ICEBERG_PACKAGES.get(".".join(pyspark.__version__.split(".")[:2]))
    if "--iceberg" in sys.argv[1:] and iceberg is not None:
        # With what Iceberg needs for tables on S3, whose credentials a catalog may hand out.
        packages += [
            iceberg,
            f"org.apache.iceberg:iceberg-aws-bundle:{iceberg.rpartition(':')[2]}",
            SQLITE_PACKAGE,
        ]
        extensions += [ICEBERG_EXTENSION]
    jars = resolve_jars(packages, environment / "ivy")
    conf = spark_home / "conf"
    conf.mkdir(exist_ok=True)
    (conf / "spark-defaults.conf").write_text(spark_defaults(jars, extensions))
    (conf / "log4j2.properties").write_text(LOG4J)
    (conf / "spark-env.sh").write_text(spark_env(environment))
    write_wrapper(environment, spark_home)
    print(f"{len(jars)} jars, {sum(jar.stat().st_size for jar in jars) / 1e6:.0f} MB")


def resolve_jars(packages: Sequence[str], ivy: Path, *, without: Sequence[str] = ()) -> list[Path]:
    """Have Spark fetch Maven packages and their dependencies into ``ivy``; those already there are reused.

    ``without`` are packages, ``group:artifact``, that others depend on and Spark has.
    """
    ivy.mkdir(exist_ok=True)
    settings = ivy / "ivysettings.xml"
    settings.write_text(IVY_SETTINGS)
    excluded = ("--exclude-packages", ",".join(without)) if without else ()
    with tempfile.TemporaryDirectory() as empty:
        # An empty application: spark-submit resolves the packages, then Python has nothing to do.
        application = Path(empty) / "nothing.py"
        application.write_text("")
        subprocess.run(
            [
                Path(pyspark.__file__).parent / "bin" / "spark-submit",
                *("--packages", ",".join(packages), *excluded),
                *("--conf", f"spark.jars.ivy={ivy}", "--conf", f"spark.jars.ivySettings={settings}"),
                application,
            ],
            check=True,
            env={**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_CONF_DIR": empty},
        )
    jars = sorted((ivy / "jars").glob("*.jar"))
    for package in packages:
        if not any(package.split(":")[1] in jar.name for jar in jars):
            raise SystemExit(f"Spark resolved {package} but left no such jar in {ivy / 'jars'}")
    return jars


def spark_defaults(jars: list[Path], extensions: Sequence[str]) -> str:
    # "local:" jars are read where they lie; plain paths would be copied for every application and executor.
    return "\n".join(
        [
            "# Written by tools/configure_spark.py.",
            f"spark.jars {','.join(f'local:{jar}' for jar in jars)}",
            f"spark.sql.extensions {','.join(extensions)}",
            "spark.sql.catalog.spark_catalog org.apache.spark.sql.delta.catalog.DeltaCatalog",
            "spark.ui.showConsoleProgress false",
            "",
        ]
    )


def spark_env(environment: Path) -> str:
    log_dir = environment.parent / "logs"
    return f"""# Written by tools/configure_spark.py.
export PYSPARK_PYTHON="${{PYSPARK_PYTHON:-{environment}/bin/python}}"
export PIPEMAX_LOG_DIR="${{PIPEMAX_LOG_DIR:-{log_dir}}}"
mkdir -p "$PIPEMAX_LOG_DIR"
"""


def write_wrapper(environment: Path, spark_home: Path) -> None:
    """Replace the environment's ``bin/spark-submit`` with one that knows where Spark is.

    The one that pip installs asks whichever python3 is on PATH.
    """
    wrapper = environment / "bin" / "spark-submit"
    wrapper.unlink(missing_ok=True)  # it may be a hard link into the installer's cache
    wrapper.write_text(f"""#!/bin/sh
# Written by tools/configure_spark.py.
export SPARK_HOME="{spark_home}"
export PYSPARK_PYTHON="${{PYSPARK_PYTHON:-{environment}/bin/python}}"
exec "$SPARK_HOME/bin/spark-submit" "$@"
""")
    wrapper.chmod(0o755)


if __name__ == "__main__":
    main()
