"""Provide a Spark session with Delta, or say in one sentence what is missing.

Under ``spark-submit`` and on Databricks, the user sets the session's options. Under plain Python, this module sets
them: local mode if no master is set, this interpreter for the tasks, and Delta from Maven if it is missing.
"""

import contextlib
import itertools
import os
import pwd
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipemax_spark.errors import JobError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DELTA_PACKAGES = {
    "4.0": "io.delta:delta-spark_2.13:4.0.1",
    "4.1": "io.delta:delta-spark_4.1_2.13:4.3.1",
    "4.2": "io.delta:delta-spark_4.2_2.13:4.4.0",
}
"""Spark release → the Delta package made for it."""

_EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
_CATALOG = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
_MIN_JAVA = 17
_MIN_LOCAL_SLOTS = 4
"""More than a small machine has cores: tasks mostly wait for the engine, and if they are few, all of them soon wait for
their last rows (``pipemax_spark.spark.slots``)."""
ARROW_BATCH = "spark.sql.execution.arrow.maxRecordsPerBatch"
ARROW_BATCH_ROWS = 1_024
"""Tasks read ahead by one Arrow batch; with Spark's default of 10,000 rows, long prompts would take a lot of memory per
slot."""
_NEEDS_CLASSIC = (
    "This needs a classic session, in the driver: run it with spark-submit or on dedicated compute. annotate_table(), "
    "annotate() and pipemax_udf() work over Connect if the server's executors have this package"
)
SNAPSHOT_PARTITIONS = "spark.databricks.delta.snapshotPartitions"
LOCAL_SNAPSHOT_PARTITIONS = 4
"""Delta reads a table's log in 50 tasks unless told otherwise; on one machine that takes seconds for each small
table."""


def get_session(app_name: str, *, log_dir: Path, on_this_machine: bool = False) -> "SparkSession":
    """Return the running session, or start one. Raise ``JobError`` if PySpark, Java or Delta is missing.

    The output of a JVM that is started here goes to ``spark.log`` in ``log_dir``. With ``on_this_machine`` the session
    that is started is a local one, whatever master ``spark-defaults.conf`` names.
    """
    try:
        import pyspark
        from pyspark.sql import SparkSession
    except ImportError:
        raise JobError(
            "pyspark is not installed in this Python; run: pip install 'pipemax-spark[spark]'"
        ) from None
    if (running := current_session()) is not None:
        check_session(running)
        return running
    if (reason := _reason_for_connect()) is not None:
        raise JobError(f"{reason}, so Spark would start a Spark Connect session. {_NEEDS_CLASSIC}")
    is_submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    defaults = _spark_defaults(Path(pyspark.__file__).parent) | _submit_settings()
    settings: dict[str, str] = {
        "spark.sql.extensions": _EXTENSION,
        "spark.sql.catalog.spark_catalog": _CATALOG,
        ARROW_BATCH: str(ARROW_BATCH_ROWS),
        "spark.ui.showConsoleProgress": "false",
    }
    if is_submitted:
        return _submitted_session(app_name, settings)
    _check_java()
    _check_user()
    if not _has_delta(Path(pyspark.__file__).parent, defaults) and (
        package := _delta_package(pyspark.__version__)
    ):
        settings["spark.jars.packages"] = package
    settings = _beside(settings, defaults)
    _set_environment(log_dir)
    builder = SparkSession.builder.appName(app_name)
    is_master_named = "spark.master" in defaults and not on_this_machine
    if not is_master_named and "--master" not in os.environ.get("PYSPARK_SUBMIT_ARGS", ""):
        builder = builder.master(f"local[{max(_MIN_LOCAL_SLOTS, os.cpu_count() or 1)}]")
    with _output_to(log_dir / "spark.log"), _utf8_locale(), _interrupt_afterwards():
        session = builder.config(map={**settings}).getOrCreate()
    return _ready(session)


def _reason_for_connect() -> str | None:
    """Return why pyspark would start a Spark Connect session, or None if it will start a classic one."""
    from pyspark.sql.utils import is_remote
    from pyspark.util import default_api_mode

    if "SPARK_REMOTE" in os.environ:
        return "SPARK_REMOTE is set"
    mode = os.environ.get("SPARK_API_MODE")
    if mode is not None:
        return f"SPARK_API_MODE is {mode!r}" if mode.lower() == "connect" else None
    if is_remote() or default_api_mode() == "connect":
        return "this pyspark is a client of Spark Connect"
    return None


def _submitted_session(app_name: str, settings: dict[str, str]) -> "SparkSession":
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    # SparkConf sees spark-submit's flags and its defaults file only through the gateway.
    SparkContext._ensure_initialized()
    merged = _beside(settings, dict(SparkConf().getAll()))
    return _ready(SparkSession.builder.appName(app_name).config(map={**merged}).getOrCreate())


def _beside(settings: dict[str, str], user_settings: dict[str, str]) -> dict[str, str]:
    """Return the settings as far as the user has given none; lists of extensions and packages are joined."""
    joined = ("spark.sql.extensions", "spark.jars.packages")
    return {
        name: _joined(user_settings.get(name), value) if name in joined else user_settings.get(name, value)
        for name, value in settings.items()
    }


def _submit_settings() -> dict[str, str]:
    """Return the settings that ``PYSPARK_SUBMIT_ARGS`` gives to a JVM that is started here."""
    words = shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", ""))
    assignments = (after for word, after in itertools.pairwise(words) if word in ("--conf", "-c"))
    return {
        name: value
        for name, separator, value in (assignment.partition("=") for assignment in assignments)
        if separator
    }


def _ready(session: "SparkSession") -> "SparkSession":
    """Return the new session after checking for Delta; on one machine, have Delta use few tasks."""
    check_session(session)
    if is_local(session) and session.conf.get(SNAPSHOT_PARTITIONS, None) is None:
        session.conf.set(SNAPSHOT_PARTITIONS, str(LOCAL_SNAPSHOT_PARTITIONS))
    return session


def current_session() -> "SparkSession | None":
    """Return this thread's session, else the process's: a new or interrupted thread has none of its own."""
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    try:
        return SparkSession.active()
    except PySparkRuntimeError:
        return None


def is_connect(session: "SparkSession") -> bool:
    """Tell whether this is a session over Spark Connect, which has no JVM and no ``sparkContext`` here."""
    return getattr(session, "_jvm", None) is None


def is_local(session: "SparkSession") -> bool:
    """Tell whether all of the session's tasks run on this machine, in the driver."""
    return re.match(r"local(\[|$)", session.conf.get("spark.master", None) or "") is not None


def _set_environment(log_dir: Path) -> None:
    # Otherwise Spark runs its tasks with the python3 of PATH, which may not have pyarrow.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # Read by the log4j settings that `make setup` writes.
    os.environ.setdefault("PIPEMAX_LOG_DIR", str(log_dir))
    # Otherwise local-cluster mode creates its work directories in SPARK_HOME, that is in the Python environment.
    os.environ.setdefault(
        "SPARK_WORKER_DIR", str(Path(tempfile.gettempdir()) / f"pipemax-{os.getuid()}-spark")
    )


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Redirect the output of processes started in this context to ``path``: the JVM keeps its initial descriptors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = {fd: os.dup(fd) for fd in (1, 2)}
    try:
        with path.open("ab") as file:
            for fd in saved:
                os.dup2(file.fileno(), fd)
        yield
    finally:
        for fd, copy in saved.items():
            os.dup2(copy, fd)
            os.close(copy)


@contextlib.contextmanager
def _interrupt_afterwards() -> Iterator[None]:
    """Hold back the first Ctrl-C until this context ends: interrupted while a JVM starts, pyspark leaves it behind."""
    if threading.current_thread() is not threading.main_thread():  # which alone hears of signals
        yield
        return
    was_interrupted = False

    def hold(number: int, frame: object) -> None:
        nonlocal was_interrupted
        was_interrupted = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if was_interrupted:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _utf8_locale() -> Iterator[None]:
    """Have a JVM that is started in this context take the names of files for UTF-8, as this Python does."""
    before = os.environ.get("LC_ALL")
    named = before or os.environ.get("LC_CTYPE") or os.environ.get("LANG") or "C"
    try:
        if re.search(r"utf-?8", named, re.IGNORECASE) is None:
            os.environ["LC_ALL"] = "C.UTF-8"
        yield
    finally:
        if before is None:
            os.environ.pop("LC_ALL", None)
        else:
            os.environ["LC_ALL"] = before


def _check_java() -> None:
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else "java"
    executable = shutil.which(java)
    remedy = (
        f"install one (Debian, Ubuntu: apt-get install openjdk-{_MIN_JAVA}-jre-headless) or set JAVA_HOME"
    )
    if executable is None:
        raise JobError(f"Spark needs Java {_MIN_JAVA} or newer, and {java!r} was not found; {remedy}")
    output = subprocess.run([executable, "-version"], capture_output=True, text=True, check=False)
    version = re.search(r'version "(\d+)', output.stderr + output.stdout)
    if version is None or int(version[1]) < _MIN_JAVA:
        said = (output.stderr + output.stdout).strip().splitlines()
        raise JobError(
            f"Spark needs Java {_MIN_JAVA} or newer, and {executable} says {said[0] if said else 'nothing'!r}; {remedy}"
        )


def _check_user() -> None:
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        raise JobError(
            f"the user id {os.getuid()} has no entry in /etc/passwd, without which Java knows no user and no home: add "
            "one, or run as a user that has one"
        ) from None


def _spark_defaults(pyspark_home: Path) -> dict[str, str]:
    """Read ``spark-defaults.conf`` as the JVM will: there is no way to ask the JVM before it runs."""
    spark_home = Path(os.environ.get("SPARK_HOME", pyspark_home))
    file = Path(os.environ.get("SPARK_CONF_DIR", spark_home / "conf")) / "spark-defaults.conf"
    if not file.is_file():
        return {}
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    pairs = (re.split(r"[\s=]+", line, maxsplit=1) for line in lines if line and not line.startswith("#"))
    return {pair[0]: pair[1] if len(pair) > 1 else "" for pair in pairs}


def _has_delta(pyspark_home: Path, defaults: dict[str, str]) -> bool:
    spark_home = Path(os.environ.get("SPARK_HOME", pyspark_home))
    names = ("spark.jars", "spark.jars.packages", "spark.driver.extraClassPath")
    texts = [*(defaults.get(name, "") for name in names), os.environ.get("PYSPARK_SUBMIT_ARGS", "")]
    return any("delta-spark" in text for text in texts) or any((spark_home / "jars").glob("delta-spark*.jar"))


def _delta_package(spark_version: str) -> str | None:
    return DELTA_PACKAGES.get(".".join(spark_version.split(".")[:2]))


def check_session(session: "SparkSession", *, takes_connect: bool = False) -> None:
    """Raise ``JobError`` if the job cannot run in this session: it has no Delta, or it is a Spark Connect session.

    With ``takes_connect`` such a session is fine, and its first statement shows whether it has Delta.
    """
    if is_connect(session):
        if takes_connect:
            return
        raise JobError(f"this is a Spark Connect session. {_NEEDS_CLASSIC}")
    jvm: Any = session._jvm
    if jvm.org.apache.spark.util.Utils.classIsLoadable(_EXTENSION):
        return
    package = _delta_package(session.version)
    if package is None:
        raise JobError(
            f"no known Delta release fits Spark {session.version}; use Spark {', '.join(DELTA_PACKAGES)}"
        )
    raise JobError(
        f"Delta is not on the class path of Spark {session.version}; start the job with: spark-submit --packages "
        f"{package} …"
    )


def _joined(old: str | None, new: str) -> str:
    parts = [part.strip() for part in (old or "").split(",") if part.strip()]
    return ",".join(parts if new in parts else [*parts, new])
