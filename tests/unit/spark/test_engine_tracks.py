"""What the driver keeps of a long run's samples: bounded, even in time, and with the newest part whole."""

import tracemalloc
from dataclasses import replace
from itertools import pairwise

import pytest

from pipemax.wire import JobStats, ServerStats
from pipemax_spark.report.collector import Collector
from pipemax_spark.report.engine_tracks import MAX_REPORTS, MAX_REPORTS_PER_ENGINE, EngineTrack, EngineTracks
from pipemax_spark.report.progress import Progress, ProgressLine
from pipemax_spark.request.error_limits import ErrorLimits
from tests.fakes.server_reports import outlook_after, server_report

JOB = JobStats(rows_done=7)
METRICS = {"measured_step_s": 0.25, "host_kv_usage": 0.5, "batch_size": 3.0}


def report(server: str, at_s: float = 0.0) -> ServerStats:
    return server_report(server, at_s=at_s, job=JOB, phase="decode", kv_usage=0.75, engine_metrics=METRICS)


def test_a_long_track_is_thinned_evenly_and_ends_with_each_of_the_newest_reports() -> None:
    tracks = EngineTracks()
    for second in range(10 * MAX_REPORTS_PER_ENGINE):
        tracks.add(report("a"), JobStats(rows_done=2 * second), reported_s=float(second))
    track = tracks.by_server["a"]
    assert MAX_REPORTS_PER_ENGINE // 2 < len(track) <= MAX_REPORTS_PER_ENGINE
    assert list(track.rows_done) == [2 * at_s for at_s in track.reported_s]
    assert track.reported_s[0] == 0.0
    assert track.reported_s[-1] == 10 * MAX_REPORTS_PER_ENGINE - 1
    gaps = [after - before for before, after in pairwise(track.reported_s)]
    assert gaps == sorted(gaps, reverse=True), "never finer in the past than now"
    assert gaps[-100:] == [1.0] * 100


def test_the_rate_of_a_thinned_track_is_over_the_gaps_that_are_left() -> None:
    track = EngineTrack()
    for at_s in (0.0, 60.0, 120.0, 124.0, 128.0, 132.0, 136.0):
        track.add(report("a"), JobStats(rows_done=int(3 * at_s)), reported_s=at_s)
    assert track.rows_per_s(over_s=10.0) == [0.0, *[3.0] * 6]


def test_all_tracks_together_hold_a_bounded_number_of_reports() -> None:
    tracks, engines = EngineTracks(), 400
    stats = [report(f"server {number}") for number in range(engines)]
    for second in range(1_000):
        for server in stats:
            tracks.add(server, JOB, reported_s=float(second))
    assert sum(len(track) for track in tracks.by_server.values()) <= MAX_REPORTS
    for number in range(engines):  # all of them start again, under new names
        tracks.add(report(f"successor {number}"), JOB, reported_s=2_000.0)
    assert sum(len(track) for track in tracks.by_server.values()) <= MAX_REPORTS


def test_a_report_is_kept_once_with_what_it_told() -> None:
    tracks = EngineTracks()
    for _ in range(3):
        tracks.add(report("a"), JOB, reported_s=1.0)
    tracks.add(replace(report("a"), state="failed"), JOB, reported_s=2.0)
    track = tracks.by_server["a"]
    assert (list(track.reported_s), list(track.kv_usage)) == ([1.0, 2.0], [0.75, 0.75])
    assert track.phases == ["decode", "failed"]
    assert (track.measured_step_s[0], track.host_kv_usage[0]) == (0.25, 0.5)
    assert track.predicted_step_s[0] != track.predicted_step_s[0], "NaN: not reported"


def test_a_sample_sums_up_the_engines() -> None:
    with Collector(host="127.0.0.1", bind_hosts=["127.0.0.1"], job_id="job") as collector:
        progress = _progress(collector)
        for server, phase, batch in (("a", "decode", 2.0), ("b", "prefill", 4.0), ("c", "decode", 6.0)):
            metrics = {"batch_size": batch, "not_shown": 1.0}
            stats = replace(report(server), phase=phase, running_requests=5, engine_metrics=metrics)
            outlook_after(collector, stats)
        sample = progress.take_sample()
    assert (sample.rows_done, sample.running_requests, sample.kv_usage) == (21, 15, 0.75)
    assert sample.phases == "2 decode, 1 prefill"
    assert sample.engine_means == {"batch_size": pytest.approx(4.0)}
    assert "2 decode, 1 prefill" in progress.line(sample)


def test_samples_of_many_engines_take_little_memory_however_many_there_are() -> None:
    engines = 2
    with Collector(host="127.0.0.1", bind_hosts=["127.0.0.1"], job_id="job") as collector:
        progress = _progress(collector)
        tracemalloc.start()
        for second in range(4_100):  # more than are kept
            for number in range(engines):
                outlook_after(collector, report(f"server {number}", at_s=float(second)))
            progress.take_sample()
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert len(progress.samples) <= 4_000
    assert held < 4_000 * (2_000 + engines * 60), "bytes: a sample, and a report of each engine"


def _progress(collector: Collector) -> Progress:
    line = ProgressLine(show=lambda text: None, period_s=1.0)
    progress = Progress(collector, line, limits=ErrorLimits(max_rate=0.5), stop_job=lambda reason: None)
    progress.expect(100)
    return progress
