"""Whether more rows may come: from streams, and from what the driver says."""

from collections import Counter
from dataclasses import replace

from pipemax.api import GenerationRequest, Image, Message, Sampling
from pipemax.serve.flow.open_input import InputWatch
from pipemax.wire import JobOutlook


class Bench:
    """A watch whose clock and counts a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.received = Counter[str]()
        self.watch = InputWatch(lambda job_id: self.received[job_id], clock=lambda: self.now_s)

    def hear(self, rows_left: int, engines: int = 1) -> None:
        self.watch.hear(JobOutlook(job_id="job", rows_left=rows_left, engines=engines))


def test_input_is_open_while_a_stream_is_and_for_the_gap_between_two_tasks() -> None:
    bench = Bench()
    assert not bench.watch.is_open()
    bench.watch.open(1, "job")
    bench.watch.open(2, "job")
    bench.watch.close(1, "job")
    bench.now_s = 100.0
    assert bench.watch.is_open()
    bench.watch.end(2)
    assert not bench.watch.is_open(), "its task holds the slot while its rows run"
    bench.watch.close(2, "job")
    bench.now_s = 101.0
    assert bench.watch.is_open()
    bench.now_s = 103.0
    assert not bench.watch.is_open()
    bench.watch.open(3, "job")
    assert bench.watch.is_open()


def test_with_no_row_left_input_ends_at_once_and_with_some_the_gap_is_longer() -> None:
    bench = Bench()
    bench.watch.open(1, "job")
    bench.hear(rows_left=500)
    bench.watch.close(1, "job")
    bench.now_s = 5.0
    assert bench.watch.is_open()
    bench.hear(rows_left=0)
    assert not bench.watch.is_open()


def test_each_engine_takes_its_share_of_what_is_left() -> None:
    bench = Bench()
    bench.watch.open(1, "job")
    assert bench.watch.rows_left() is None
    bench.received["job"] = 1_000
    bench.hear(rows_left=90, engines=3)
    assert bench.watch.rows_left() == 30
    bench.received["job"] += 12
    assert bench.watch.rows_left() == 18
    bench.received["job"] += 50
    assert bench.watch.rows_left() == 0
    bench.hear(rows_left=90, engines=1)
    assert bench.watch.rows_left() is None, "there is nobody to leave rows to"


def test_without_a_report_on_every_job_the_rows_left_are_unknown() -> None:
    bench = Bench()
    bench.watch.open(1, "job")
    bench.hear(rows_left=90, engines=3)
    bench.watch.open(2, "other")
    assert bench.watch.rows_left() is None


def test_the_traits_are_those_of_rows_of_the_jobs_whose_input_is_open() -> None:
    bench = Bench()
    bench.watch.open(1, "job")
    plain = GenerationRequest(request_id="0", prompt="x")
    bench.watch.note_sent("job", [plain, replace(plain, sampling=Sampling(regex="a"))])
    bench.watch.note_sent("job", [plain])
    assert bench.watch.traits() == {"is_constrained"}
    bench.watch.open(2, "other")
    shown = Message(role="user", content=("what is this?", Image(source="x.png")))
    bench.watch.note_sent("other", [replace(plain, prompt=None, messages=(shown,))])
    assert bench.watch.traits() == {"is_constrained", "has_images"}
    bench.watch.end(1)
    assert bench.watch.traits() == {"has_images"}
