"""A step that hangs is noticed from another thread; long idleness is none."""

import threading

from pipemax.vllm_ext.engine.step_watch import StepWatch


def test_only_a_step_that_does_not_end_is_a_fault() -> None:
    with (patient := StepWatch(timeout_s=60.0)).step():
        assert patient.fault() is None
    watch = StepWatch(timeout_s=0.0)
    assert watch.fault() is None, "no step runs"
    hangs, release = threading.Event(), threading.Event()

    def run() -> None:
        with watch.step():
            hangs.set()
            release.wait()

    stepping = threading.Thread(target=run)
    stepping.start()
    hangs.wait()
    assert "one step has not ended within 0 s" in (watch.fault() or "")
    release.set()
    stepping.join()
    assert watch.fault() is None
