"""Spark applications as processes of their own, and which engine servers run on this machine."""

import contextlib
from pathlib import Path

from pipemax.wire import ProcessIdentity

SMALL_JVM = (
    "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m -XX:+UseSerialGC "
    "-XX:MetaspaceSize=256m -Xmn256m -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
)
"""Java options. The tests' JVMs are short-lived and spend more on loading and compiling than on running; with the
48 MiB of compiled code that one compiler is given by default, they would throw it away and compile again. Nor do they
collect garbage each time that loaded classes fill a few MB more."""
SMALL_SPARK = (
    "--conf spark.sql.shuffle.partitions=2 --conf spark.databricks.delta.snapshotPartitions=1 "
    "--conf spark.sql.codegen.wholeStage=false --conf spark.sql.codegen.factoryMode=NO_CODEGEN "
    "--conf spark.sql.sources.parallelPartitionDiscovery.parallelism=2 "
    f"--conf spark.ui.enabled=false --driver-java-options '{SMALL_JVM}'"
)
"""For PYSPARK_SUBMIT_ARGS. The tests' tables are small: by default a shuffle has 200 tasks, reading Delta's log 50 and
VACUUM 10,000, and each query is compiled."""


def servers_of(mark: str | Path) -> set[ProcessIdentity]:
    """The engine servers with this in their command line: their ``engine_python``, or their log directory."""
    return processes_with(str(mark), "\0pipemax.serve\0")


def processes_with(*marks: str) -> set[ProcessIdentity]:
    """The processes with all of these in their command line, in which a null byte ends each argument."""
    found = set()
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = cmdline.read_bytes()
            if all(mark.encode() in command for mark in marks):
                found.add(ProcessIdentity.of(int(cmdline.parent.name)))
    return found
