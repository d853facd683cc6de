"""Write one MLflow run per job, from the driver. A slow or unavailable store costs a warning, never the job.

Everything goes through one separate thread, with short time limits and a bounded queue. The job waits for this thread
only at the very end, and then not for long. MLflow is imported there too, and need not be installed.

If the caller, such as a notebook, has an active MLflow run, the job's run becomes its child: a run takes each parameter
once, so two jobs in one notebook could not both log into the notebook's run. That run is never written to and never
ended.
"""

import json
import logging
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipemax_spark.errors import first_line
from pipemax_spark.report.samples import SAMPLE_METRICS, Sample, run_metric, total_metric

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger(__name__)

_LONGEST_VALUE = 500
"""MLflow refuses longer parameter values on some stores."""
_LONGEST_DIGEST = 36
_PARAMS_PER_CALL, _METRICS_PER_CALL = 100, 1_000
_MOST_QUEUED = 4
_FINISH_TIMEOUT_S = 30.0
_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_CONFIGURE_LOGGING": "false",  # else its own handler writes to standard error
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
_APART_S = 5.0
_APART_SHARE = 1 / 2_000
"""Minimum distance between two points of a metric, in seconds and as a share of the run's age: a week has about 10,000
points. The run's Parquet file has a finer resolution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputTable:
    """The table that a run reads, as MLflow's dataset."""

    name: str
    version: str
    """The table's version, or the run's id for an input without versions."""
    kind: str
    """Its format or description, such as ``delta``."""


class Tracker:
    """Records one run, or nothing if the store cannot be used."""

    def __init__(self, experiment: str, *, local_store: Path, warn: Callable[[str], None]) -> None:
        """Choose the store.

        Create the tracker on the thread that may have an active run, because MLflow keeps the run per thread.

        The store is that of the caller's active run, else what ``mlflow.set_tracking_uri`` or ``MLFLOW_TRACKING_URI``
        names, else Databricks' own, else ``local_store``. The experiment of an active run takes precedence over
        ``experiment``. Nothing is recorded if ``experiment`` is empty.
        """
        self._warn = warn
        self._is_off = not experiment
        self._parent_run_id = _active_run_id()
        self.uri, self._is_local = store_uri(local_store, has_parent=self._parent_run_id is not None)
        # Databricks names experiments by their place in the workspace.
        in_workspace = self.uri.startswith("databricks") and not experiment.startswith("/")
        self._experiment = f"/Shared/{experiment}" if in_workspace else experiment
        self._local_store = local_store
        self._client: MlflowClient | None = None
        self._is_broken = False
        self._has_warned = False
        self._logged_until_s = -math.inf
        self._started_unix_s = time.time()
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        # A daemon thread: a store that does not answer must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="pipemax-mlflow", daemon=True)
        self.run_id: str | None = None
        self._set: dict[str, str] = {}
        """The variables that this tracker has set in the caller's environment, until the run ends."""

    @property
    def place(self) -> str:
        """The place where a person finds the run."""
        if self.run_id is None:
            return "none"
        if self._parent_run_id is not None:
            return f"{self.run_id}, child of run {self._parent_run_id}, at {self.uri}"
        if self._is_local:
            return f"{self.run_id} (mlflow ui --backend-store-uri {self.uri})"
        return f"{self.run_id} at {self.uri}"

    def start(
        self,
        name: str,
        params: Mapping[str, object],
        *,
        dataset: InputTable | None = None,
        description: str = "",
    ) -> None:
        """Begin the run. ``description`` (Markdown) stands at the top of its page."""
        if not self._is_off:
            self._set = {name: value for name, value in _SETTINGS.items() if name not in os.environ}
            os.environ.update(self._set)
            self._thread.start()
            self._work.put(lambda: self._start(name, params, dataset, description))

    def log_samples(self, samples: Sequence[Sample]) -> None:
        """Log the samples that are new since the last call; leave them for the next call while the store is behind."""
        if not self._is_off and self._work.qsize() < _MOST_QUEUED:
            self._work.put(lambda: self._log_samples(samples))

    def tag(self, tags: Mapping[str, str]) -> None:
        """Record facts that become known only during the run."""
        if not self._is_off:
            self._work.put(lambda: self._tag(tags))

    def finish(
        self,
        status: str,
        samples: Sequence[Sample],
        totals: Mapping[str, float] | None = None,
        artifacts: Sequence[Path] = (),
    ) -> None:
        """End the run as ``FINISHED``, ``FAILED`` or ``KILLED``, and log the samples that are new."""
        if self._is_off:
            return
        self._work.put(lambda: self._log_samples(samples, with_last=True))
        self._work.put(lambda: self._finish(status, totals or {}, artifacts))
        self._work.put(None)
        self._thread.join(_FINISH_TIMEOUT_S)
        if self._thread.is_alive():
            self._warn_once(
                f"MLflow at {self.uri} did not accept everything within {_FINISH_TIMEOUT_S:.0f} s"
            )
        for name, value in self._set.items():
            if os.environ.get(name) == value:
                del os.environ[name]

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if self._is_broken:
                continue
            try:
                work()
            except Exception as error:  # whatever a store raises, the rows matter more
                log.warning("MLflow failed", exc_info=True)
                # Without a run there is nothing to write to; with one, the next call may succeed.
                self._is_broken = self.run_id is None
                reason = first_line(error)[:300]
                self._warn_once(f"MLflow at {self.uri} failed; the job continues without it: {reason}")

    def _warn_once(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(text)

    def _start(
        self, name: str, params: Mapping[str, object], table: InputTable | None, description: str
    ) -> None:
        from mlflow import MlflowClient  # seconds to import, and optional
        from mlflow.entities import Param

        self._client = client = MlflowClient(tracking_uri=self.uri)
        parent = self._parent_run_id
        tags = {"mlflow.note.content": description} if description else {}
        if parent is not None:
            tags["mlflow.parentRunId"] = parent
        experiment_id = (
            self._own_experiment(client) if parent is None else client.get_run(parent).info.experiment_id
        )
        self.run_id = run_id = client.create_run(experiment_id, run_name=name, tags=tags).info.run_id
        entries = [Param(key, str(value)[:_LONGEST_VALUE]) for key, value in params.items()]
        for first in range(0, len(entries), _PARAMS_PER_CALL):
            client.log_batch(run_id, params=entries[first : first + _PARAMS_PER_CALL])
        if table is not None:
            self._log_dataset(client, run_id, table)

    def _log_dataset(self, client: "MlflowClient", run_id: str, table: InputTable) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name=table.name[:_LONGEST_VALUE],
            digest=table.version[:_LONGEST_DIGEST],
            source_type=table.kind,
            source=json.dumps({"table": table.name, "version": table.version}),
        )
        context = InputTag(key="mlflow.data.context", value="annotation input")
        client.log_inputs(run_id, datasets=[DatasetInput(dataset=dataset, tags=[context])])

    def _own_experiment(self, client: "MlflowClient") -> str:
        """Return the id of the experiment, and create it if it does not exist."""
        artifacts = None
        if self._is_local:
            self._local_store.mkdir(parents=True, exist_ok=True)
            artifacts = (self._local_store / "artifacts").as_uri()
        known = client.get_experiment_by_name(self._experiment)
        if known is not None:
            return str(known.experiment_id)
        return str(client.create_experiment(self._experiment, artifact_location=artifacts))

    def _started_run(self) -> tuple["MlflowClient", str]:
        # If `_start` failed, nothing else is called: the store counts as broken without a run.
        assert self._client is not None, "no store has been opened"
        assert self.run_id is not None, "no run has been started"
        return self._client, self.run_id

    def _log_samples(self, samples: Sequence[Sample], *, with_last: bool = False) -> None:
        from mlflow.entities import Metric

        client, run_id = self._started_run()
        chosen = list(_thinned(samples, after_s=self._logged_until_s, with_last=with_last))
        metrics = [
            Metric(
                name,
                value,
                timestamp=round((self._started_unix_s + sample.seconds) * 1000),
                step=round(sample.seconds),
            )
            for sample in chosen
            for name, value in _figures(sample).items()
        ]
        for first in range(0, len(metrics), _METRICS_PER_CALL):
            client.log_batch(run_id, metrics=metrics[first : first + _METRICS_PER_CALL])
        if chosen:
            self._logged_until_s = chosen[-1].seconds

    def _tag(self, tags: Mapping[str, str]) -> None:
        client, run_id = self._started_run()
        for name, value in tags.items():
            client.set_tag(run_id, name, value[:_LONGEST_VALUE])

    def _finish(self, status: str, totals: Mapping[str, float], artifacts: Sequence[Path]) -> None:
        from mlflow.entities import Metric

        client, run_id = self._started_run()
        now_ms = round(time.time() * 1000)
        metrics = [
            Metric(total_metric(name), value, timestamp=now_ms, step=0) for name, value in totals.items()
        ]
        client.log_batch(run_id, metrics=metrics)
        for artifact in artifacts:
            client.log_artifact(run_id, str(artifact))
        client.set_terminated(run_id, status=status)


def store_uri(local_store: Path, *, has_parent: bool = False) -> tuple[str, bool]:
    """Return the store's URI, as ``Tracker`` chooses it, and whether it is ``local_store``."""
    if (uri := _chosen_uri(has_parent=has_parent)) is not None:
        return uri, False
    if "DATABRICKS_RUNTIME_VERSION" in os.environ:
        return "databricks", False
    return f"sqlite:///{local_store / 'mlflow.db'}", True


def _active_run_id() -> str | None:
    """Return the run that the caller of this thread has active, or that ``mlflow run`` started this process for."""
    mlflow = sys.modules.get("mlflow")  # a caller with an active run has imported it
    active = None if mlflow is None else mlflow.active_run()
    return os.environ.get("MLFLOW_RUN_ID") if active is None else str(active.info.run_id)


def _chosen_uri(*, has_parent: bool) -> str | None:
    """Return the tracking URI that the caller chose, or None. A caller with an active run has one in any case."""
    mlflow = sys.modules.get("mlflow")
    if mlflow is not None and (has_parent or mlflow.is_tracking_uri_set()):
        return str(mlflow.get_tracking_uri())
    return os.environ.get("MLFLOW_TRACKING_URI")


def _thinned(samples: Sequence[Sample], *, after_s: float, with_last: bool) -> Iterator[Sample]:
    """Yield the samples that are new and far enough apart, and the last one if that is asked for."""
    for sample in samples:
        apart_s = max(_APART_S, sample.seconds * _APART_SHARE)
        if sample.seconds >= after_s + apart_s or (
            with_last and sample is samples[-1] and sample.seconds > after_s
        ):
            after_s = sample.seconds
            yield sample


def _figures(sample: Sample) -> dict[str, float]:
    figures = {name: float(getattr(sample, name)) for name in SAMPLE_METRICS} | dict(sample.engine_means)
    return {run_metric(name): value for name, value in figures.items()}
