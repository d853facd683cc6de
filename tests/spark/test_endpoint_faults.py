"""A job over endpoints that break, whose engine server is killed in its midst."""

import os
import signal
import threading
from collections import Counter
from dataclasses import replace

import pytest

from pipemax_spark.engines.stop import stop_engines
from tests.endpoints.faulty_server import MANY_FAULTS, FaultyServer
from tests.endpoints.openai_server import serving
from tests.spark.conftest import Jobs, words
from tests.spark.processes import servers_of
from tests.waiting import wait_until

ROWS = 200


@pytest.mark.long  # tests/endpoints has the faults
def test_each_row_is_there_once_although_transfers_break_and_the_engine_server_is_killed(run: Jobs) -> None:
    run.write_input(words(0, ROWS))
    stop_engines(run.spark, force=True)  # a server of an earlier test would go on, under that test's log
    hold = run.directory / "hold"
    hold.touch()
    with serving(FaultyServer(faults=MANY_FAULTS, seed=1, held_by=hold, held_row_s=0.01)) as server:
        run.defaults = replace(run.defaults, engine=server.config(), engine_python=None)
        killed: list[int] = []

        def kill() -> None:
            wait_until(lambda: server.answered.total() > ROWS // 3, 120, "a third of the rows is answered")
            for process in servers_of(run.defaults.log_dir):
                os.kill(process.pid, signal.SIGKILL)
                killed.append(process.pid)
            hold.unlink()

        striker = threading.Thread(target=kill)
        striker.start()
        summary = run.run()
        striker.join()
    assert len(killed) == 1
    assert (summary.rows_out, summary.rows_error) == (ROWS, 0)
    assert Counter(row["annotation"]["text"] for row in run.rows()) == Counter(
        f"said: Say word {number}" for number in range(ROWS)
    )
    assert 0 < summary.spent.requests < 3 * ROWS
