"""An Airflow operator that runs a PipeMax job by its command, and decides by how the job ended whether a retry helps.

Copy this file next to your DAGs (tried with Airflow 3.3). The worker needs no PipeMax itself, only the command: that of
an environment that has it (``/opt/pipemax/bin/pipemax-annotate``), or ``spark-submit … jobs/annotate.py``.
"""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException

_FINAL = {
    "refused": "the call or the input has to be changed",
    "error_rows": "too many rows failed; a retry would find nothing new to do",
    "canary": "the first rows differ from the last run's; look at the report",
    "max_cost": "the limit is reached; a retry would spend as much again",
    "max_hours": "the limit is reached; a retry would take as long again",
    "max_tokens_total": "the limit is reached; a retry would take as many again",
    "done_by": "the time is over",
}
"""How a job ended, where the same command would end so again: the task fails at once, whatever its ``retries`` say."""


class PipeMaxOperator(BaseOperator):
    """Run the command and return its summary, which other tasks find in XCom: counts, cost, ``ended_by``, no texts.

    Whatever else ends the job (a lost machine, a kill, another run on the output, an input that is late), Airflow's
    ``retries`` run the same command again, which does the rows that are left. A task that is cleared, or marked as
    failed, tells the job to stop; what it has committed stays.
    """

    template_fields: Sequence[str] = ("command", "env")

    def __init__(self, *, command: Sequence[str], env: dict[str, str] | None = None, **others: Any) -> None:
        """``command`` is the command with its arguments, without ``--summary``; ``env`` are further variables."""
        super().__init__(**others)
        self.command = list(command)
        self.env = env or {}
        self._process: subprocess.Popen[str] | None = None

    def execute(self, context: Any) -> dict[str, Any]:
        """Run the job to its end."""
        with tempfile.TemporaryDirectory() as directory:
            summary = Path(directory) / "summary.json"
            status = self._run([*self.command, "--summary", str(summary)])
            facts: dict[str, Any] = json.loads(summary.read_text()) if summary.exists() else {}
        ended_by = facts.get("ended_by")
        if status == 0:
            return facts
        # Arguments that the command cannot read are refused before there is a summary.
        if ended_by in _FINAL or (status == 2 and not facts):
            reason = _FINAL[ended_by or "refused"]
            raise AirflowFailException(
                f"PipeMax ended with status {status} ({ended_by or 'refused'}): {reason}"
            )
        raise AirflowException(
            f"PipeMax ended with status {status} ({ended_by or 'killed'}), rows left: {facts.get('rows_left')}; "
            "a retry goes on where it stopped"
        )

    def on_kill(self) -> None:
        """Tell the job, with all of its processes, to stop."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)

    def _run(self, command: Sequence[str]) -> int:
        self._process = subprocess.Popen(
            command,
            env=os.environ | self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.log.info("%s", line.rstrip())
        return self._process.wait()
