"""What may be sent between two reports of the scheduler."""

from pipemax.vllm_ext.engine.admission import AdmissionBook


def test_before_any_report_the_room_is_the_capacity_less_what_is_held() -> None:
    book = AdmissionBook(1_000)
    book.submit("a", 300)
    assert book.credit_tokens() == 700
    book.end(["a", "unknown"])
    assert book.credit_tokens() == 1_000


def test_what_the_scheduler_has_not_heard_of_is_taken_off_its_demand() -> None:
    book = AdmissionBook(1_000)
    for name in ("a", "b", "c"):
        book.submit(name, 300)
        book.send(name)
    book.report(demand_tokens=600, mean_tokens=100, num_known=2)
    assert book.credit_tokens() == 600 - 100, "c counts as the mean request"
    book.submit("d", 300)
    assert book.credit_tokens() == 600 - 200, "also while it is on its way to the engine"
    book.report(demand_tokens=600, mean_tokens=100, num_known=3)
    assert book.credit_tokens() == 600 - 100
    book.end(["d"])
    assert book.credit_tokens() == 600


def test_an_aborted_request_does_not_shift_the_count_of_those_that_are_known() -> None:
    book = AdmissionBook(1_000)
    for name in ("a", "b", "c"):
        book.submit(name, 300)
        book.send(name)
    book.end(["a"])
    book.report(demand_tokens=500, mean_tokens=100, num_known=2)
    assert book.credit_tokens() == 400, "only c is unknown"


def test_where_more_waits_than_fits_the_credit_is_negative_and_an_empty_engine_has_all_its_room() -> None:
    book = AdmissionBook(1_000)
    book.submit("a", 300)
    book.send("a")
    book.report(demand_tokens=-50, mean_tokens=100, num_known=1)
    assert book.credit_tokens() == -50
    book.end(["a"])
    assert book.credit_tokens() == 1_000
