"""A worker that is killed while it loads the model, as the kernel does when memory runs out."""

import os
import signal

from pipemax.vllm_ext.worker.cpu_worker import PipeMaxCpuWorker


class KilledWorker(PipeMaxCpuWorker):
    """The second stage never loads its model."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super().load_model(load_dummy_weights=load_dummy_weights)
