"""One client in a process of its own: ``python -m tests.serve.client_process ENGINE_PYTHON ROWS BATCH_ROWS TASK``.

Exits 0 when every row came back exactly once with its own text.
"""

import sys

from pipemax_spark.executor.client import complete
from tests.serve.support import assert_exactly_once, options, request_batches


def main() -> None:
    engine_python, rows, batch_rows, task = sys.argv[1:]
    opts = options(engine_python, max_num_seqs=512, child_process=False)
    batches = list(complete(request_batches(int(rows), int(batch_rows)), opts, task=task))
    assert_exactly_once(batches, int(rows))


if __name__ == "__main__":
    main()
