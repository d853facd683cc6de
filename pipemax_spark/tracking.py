"""One MLflow run per job, written by the driver. A store that is down costs a warning, never the job.

Everything goes through one thread of its own, so that a slow store cannot hold the job up either.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

from pipemax_spark.progress import Sample

log = logging.getLogger(__name__)

_LONGEST_VALUE = 500
_CLOSE_TIMEOUT_S = 60.0


class Tracker:
    """Records one run, or nothing once the store has failed."""

    def __init__(self, experiment: str, *, local_store: Path, warn: Callable[[str], None]) -> None:
        self._experiment = experiment
        self._local_store = local_store
        self._warn = warn
        self._failed = False
        self._client: Any = None
        self._logged = 0
        self._started_unix_s = time.time()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pipemax-mlflow")
        self.run_id: str | None = None
        self.uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{local_store / 'mlflow.db'}"

    def start(self, name: str, params: Mapping[str, Any]) -> None:
        self._submit(lambda: self._start(name, params))

    def log_samples(self, samples: Sequence[Sample]) -> None:
        """Those that are new since the last call."""
        new, self._logged = list(samples[self._logged :]), len(samples)
        self._submit(lambda: self._log_samples(new))

    def finish(self, status: str, totals: Mapping[str, float], artifacts: Sequence[Path]) -> None:
        """The end of the run; waits for the store, but not for ever."""
        last = self._submit(lambda: self._finish(status, totals, artifacts))
        with contextlib.suppress(FutureTimeoutError):
            last.result(timeout=_CLOSE_TIMEOUT_S)
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _submit(self, work: Callable[[], None]) -> Future[None]:
        return self._worker.submit(self._guarded, work)

    def _guarded(self, work: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            work()
        except Exception as error:  # whatever a store raises, the rows matter more
            self._failed = True
            log.warning("MLflow failed", exc_info=True)
            self._warn(
                f"MLflow at {self.uri} failed, the job goes on without it: {str(error).strip().splitlines()[:1]}"
            )

    def _start(self, name: str, params: Mapping[str, Any]) -> None:
        # Its log goes where this process's log goes, not to the console.
        os.environ.setdefault("MLFLOW_CONFIGURE_LOGGING", "0")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow import MlflowClient  # seconds to import, and optional

        artifacts = None
        if "MLFLOW_TRACKING_URI" not in os.environ:
            self._local_store.mkdir(parents=True, exist_ok=True)
            artifacts = (self._local_store / "artifacts").as_uri()
        self._client = MlflowClient(tracking_uri=self.uri)
        known = self._client.get_experiment_by_name(self._experiment)
        experiment_id = (
            known.experiment_id
            if known
            else self._client.create_experiment(self._experiment, artifact_location=artifacts)
        )
        self.run_id = self._client.create_run(experiment_id, run_name=name).info.run_id
        for key, value in params.items():
            self._client.log_param(self.run_id, key, str(value)[:_LONGEST_VALUE])

    def _log_samples(self, samples: Sequence[Sample]) -> None:
        from mlflow.entities import Metric

        names = (
            "rows_done",
            "rows_per_s",
            "tokens_per_s",
            "running_requests",
            "waiting_requests",
            "kv_usage",
        )
        metrics = [
            Metric(
                name,
                float(getattr(sample, name)),
                timestamp=round((self._started_unix_s + sample.seconds) * 1000),
                step=round(sample.seconds),
            )
            for sample in samples
            for name in names
        ]
        for start in range(0, len(metrics), 1000):  # MLflow takes no more in one call
            self._client.log_batch(self.run_id, metrics=metrics[start : start + 1000])

    def _finish(self, status: str, totals: Mapping[str, float], artifacts: Sequence[Path]) -> None:
        for name, value in totals.items():
            self._client.log_metric(self.run_id, name, value)
        for artifact in artifacts:
            if artifact.is_file():
                self._client.log_artifact(self.run_id, str(artifact))
        self._client.set_terminated(self.run_id, status=status)
