"""A worker whose model cannot be loaded."""

from pipemax.vllm_ext.worker.cpu_worker import CpuStageWorker


class RaisingWorker(CpuStageWorker):
    """Raises as a defect of ours or a missing package would."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        raise IndexError("pop from an empty deque")
