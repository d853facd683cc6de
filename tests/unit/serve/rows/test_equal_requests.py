"""Which requests are computed, and whose outcome the others take."""

from collections.abc import Sequence

from pipemax.api import Completion, GenerationRequest, RequestError, Sampling
from pipemax.serve.rows.equal_requests import Admission, EqualRequests
from pipemax.serve.rows.result_cache import ResultCache, cache_key
from pipemax.wire import ErrorCode

CONTENT = b"c" * 16


class Bench:
    def __init__(self, cache_bytes: int = 2**20) -> None:
        self.equals = EqualRequests(ResultCache(cache_bytes))

    def admit(self, *rows: tuple[str, str], content: bytes = CONTENT, **sampling: float) -> Admission:
        requests = [
            GenerationRequest(request_id=name, prompt=prompt, sampling=Sampling(**sampling))  # type: ignore[arg-type]
            for name, prompt in rows
        ]
        return self.equals.admit(requests, [cache_key("engine", r) for r in requests], content)

    def end(self, name: str, error: RequestError | None = None) -> dict[str, Completion]:
        """What the rows that waited get."""
        text = None if error else f"answer of {name}"
        ended = Completion(request_id=name, text=text, completion_tokens=3, token_ids=(1,), error=error)
        return {each.request_id: each for each in self.equals.record_ends([ended])}


def computed(admission: Admission) -> Sequence[str]:
    return [request.request_id for request, _ in admission.computed]


def test_of_equal_requests_in_flight_one_is_computed_and_all_get_its_answer() -> None:
    bench = Bench()
    first = bench.admit(("1:0", "a"), ("1:1", "b"), ("1:2", "a"))
    assert (computed(first), first.waiting) == (["1:0", "1:1"], ["1:2"])
    second = bench.admit(("2:0", "a"))
    assert (computed(second), second.waiting) == ([], ["2:0"])
    others = bench.end("1:0")
    assert {name: (each.text, each.is_reused) for name, each in others.items()} == {
        "1:2": ("answer of 1:0", True),
        "2:0": ("answer of 1:0", True),
    }
    assert bench.end("1:1") == {}
    (known,) = bench.admit(("3:0", "a")).answered
    assert (known.request_id, known.text, known.is_reused) == ("3:0", "answer of 1:0", True)
    assert bench.equals.num_computing == 0


def test_requests_that_are_sampled_without_a_seed_are_all_computed() -> None:
    bench = Bench()
    rows = [("1:0", "a"), ("1:1", "a")]
    assert computed(bench.admit(*rows, temperature=0.5)) == ["1:0", "1:1"]
    assert bench.end("1:0") == {}
    assert computed(bench.admit(("1:2", "a"), temperature=0.5)) == ["1:2"]
    assert computed(bench.admit(("2:0", "a"), ("2:1", "a"), temperature=0.5, seed=7)) == ["2:0"]


def test_an_error_goes_to_the_rows_that_wait_and_to_no_later_one() -> None:
    bench = Bench()
    bench.admit(("1:0", "a"), ("1:1", "a"))
    error = RequestError(code=ErrorCode.ENGINE_ERROR, message="it failed")
    assert [each.error for each in bench.end("1:0", error).values()] == [error]
    assert computed(bench.admit(("1:2", "a"))) == ["1:2"]


def test_a_computation_goes_on_while_someone_waits_for_it_and_stops_with_the_last() -> None:
    bench = Bench()
    bench.admit(("1:0", "a"), ("2:0", "a"), ("3:0", "a"))
    assert bench.equals.leave(["1:0"]) == []
    assert bench.equals.leave(["1:0"]) == [], "leaving twice is harmless"
    assert bench.equals.leave(["2:0"]) == []
    assert set(bench.end("1:0")) == {"3:0"}
    bench.admit(("4:0", "b"), ("5:0", "b"))
    assert bench.equals.leave(["4:0"]) == []
    assert bench.equals.leave(["5:0"]) == ["4:0"], "the engine still ran the row of the session that had gone"
    assert computed(bench.admit(("6:0", "b"))) == ["6:0"]
    assert bench.equals.leave(["6:0", "unknown"]) == ["6:0", "unknown"]
    assert bench.equals.num_computing == 0


def test_the_answers_of_other_files_are_no_answers() -> None:
    bench = Bench()
    bench.admit(("1:0", "a"))
    bench.end("1:0")
    assert computed(bench.admit(("2:0", "a"), content=b"d" * 16)) == ["2:0"]


def test_a_full_cache_costs_work_and_never_a_waiting_row() -> None:
    bench = Bench(cache_bytes=1)
    bench.admit(("1:0", "a"), ("1:1", "a"))
    assert set(bench.end("1:0")) == {"1:1"}
    assert computed(bench.admit(("1:2", "a"))) == ["1:2"]
