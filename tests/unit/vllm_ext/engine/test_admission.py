"""What may be sent between two reports of the scheduler."""

import tracemalloc

from pipemax.vllm_ext.engine.admission import AdmissionBook


def _submit(book: AdmissionBook, name: str, prompt_tokens: int = 100, most_output_tokens: int = 200) -> None:
    book.submit(name, prompt_tokens=prompt_tokens, most_output_tokens=most_output_tokens)


def test_before_any_report_the_room_is_the_capacity_less_what_is_held() -> None:
    book = AdmissionBook(1_000, scheduler_reports=True)
    _submit(book, "a")
    assert book.credit_tokens() == 700
    book.end(["a", "unknown"])
    assert book.credit_tokens() == 1_000


def test_what_the_scheduler_has_not_heard_of_is_taken_off_its_demand() -> None:
    book = AdmissionBook(1_000, scheduler_reports=True)
    for name in ("a", "b", "c"):
        _submit(book, name)
        book.send(name)
    book.report(demand_tokens=600, mean_tokens=100, num_known=2)
    assert book.credit_tokens() == 600 - 100, "c counts as the mean request"
    _submit(book, "d")
    assert book.credit_tokens() == 600 - 200, "also while it is on its way to the engine"
    book.report(demand_tokens=600, mean_tokens=100, num_known=3)
    assert book.credit_tokens() == 600 - 100
    book.end(["d"])
    assert book.credit_tokens() == 600


def test_an_aborted_request_does_not_shift_the_count_of_those_that_are_known() -> None:
    book = AdmissionBook(1_000, scheduler_reports=True)
    for name in ("a", "b", "c"):
        _submit(book, name)
        book.send(name)
    book.end(["a"])
    book.report(demand_tokens=500, mean_tokens=100, num_known=2)
    assert book.credit_tokens() == 400, "only c is unknown"


def test_where_more_waits_than_fits_the_credit_is_negative_and_an_empty_engine_has_all_its_room() -> None:
    book = AdmissionBook(1_000, scheduler_reports=True)
    _submit(book, "a")
    book.send("a")
    book.report(demand_tokens=-50, mean_tokens=100, num_known=1)
    assert book.credit_tokens() == -50
    book.end(["a"])
    assert book.credit_tokens() == 1_000


def test_without_reports_a_request_counts_as_its_prompt_and_the_mean_output_so_far() -> None:
    book = AdmissionBook(100_000, scheduler_reports=False)
    for name in ("a", "b", "c"):
        _submit(book, name, most_output_tokens=4_000)
    assert book.credit_tokens() == 100_000 - 3 * 4_100, "no output has ended"
    book.learn([40, 60])
    book.end(["a", "b"])
    assert book.credit_tokens() == 100_000 - 150
    _submit(book, "d", most_output_tokens=4_000)
    assert book.credit_tokens() == 100_000 - 2 * 150
    book.learn([3_000] * 500)
    assert 100_000 - 2 * 3_100 <= book.credit_tokens() < 100_000 - 2 * 3_000, "later outputs are longer"


def test_a_request_never_counts_as_more_than_its_prompt_and_longest_output() -> None:
    book = AdmissionBook(1_000, scheduler_reports=False)
    book.learn([5_000])
    _submit(book, "choice", most_output_tokens=1)
    assert book.credit_tokens() == 1_000 - 101


def test_without_reports_nothing_is_kept_of_requests_that_have_ended() -> None:
    book = AdmissionBook(1_000, scheduler_reports=False)
    tracemalloc.start()
    for number in range(20_000):
        _submit(book, f"row {number}")
        book.send(f"row {number}")
        book.end([f"row {number}"])
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept_bytes < 100_000
