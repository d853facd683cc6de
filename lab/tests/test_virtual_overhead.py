"""How runs on virtual nodes are judged by their engines' counters."""

import zlib

import pytest

from lab.bench.virtual_child import checksum
from lab.bench.virtual_judge import Series, Sustained, Watch, sustained


def steady(begin_s: int, end_s: int, tokens_per_s: float, waited_per_s: float = 0.0) -> Series:
    series = Series()
    for second in range(end_s - begin_s + 1):
        metrics = {"output_tokens": tokens_per_s * second, "time_waiting_for_input_s": waited_per_s * second}
        series.add(begin_s + second, metrics)
    return series


def test_the_rate_is_that_of_both_engines_without_the_beginning_and_the_end() -> None:
    part = sustained([steady(100, 200, 30.0), steady(100, 200, 20.0)])
    assert (part.begin_s, part.end_s) == pytest.approx((110.0, 190.0))
    assert part.tokens_per_s == pytest.approx(50.0)
    assert part.busy == 1.0


def test_an_engine_that_began_late_and_one_that_waits_are_seen() -> None:
    late = sustained([steady(100, 200, 20.0), steady(150, 200, 20.0)])
    assert late.tokens_per_s < 40.0
    waits = sustained([steady(100, 200, 20.0), steady(100, 200, 20.0, waited_per_s=0.1)])
    assert waits.busy == pytest.approx(0.95)


def test_engines_that_were_hardly_heard_are_refused() -> None:
    with pytest.raises(ValueError, match="heard fewer than twice"):
        sustained([steady(100, 200, 20.0), Series(at_s=[1.0], tokens=[1.0], waited_s=[0.0])])
    with pytest.raises(ValueError, match="heard fewer than twice"):
        sustained([])


def test_memory_grows_from_the_first_third_to_the_last() -> None:
    part = Sustained(begin_s=10.0, end_s=18.0, tokens_per_s=1.0, busy=1.0)
    watch = Watch(run="r", at_s=[float(second) for second in range(30)])
    watch.mib["driver JVM"] = [float(second) for second in range(30)]
    watch.mib["bare engine"] = [0.0] * 30
    assert watch.growth(part) == {"driver JVM": pytest.approx(17 / 11, abs=1e-3)}
    with pytest.raises(ValueError, match="2 samples"):
        watch.growth(Sustained(begin_s=10.0, end_s=11.0, tokens_per_s=1.0, busy=1.0))


def test_two_rows_with_each_other_s_texts_have_another_checksum() -> None:
    assert checksum([1, 2], ["a", "b"]) != checksum([1, 2], ["b", "a"])
    assert checksum([1], ["a"]) == zlib.crc32(b"1 a"), "as Spark's crc32(concat(id, ' ', text))"
