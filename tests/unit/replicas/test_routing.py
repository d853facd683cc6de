"""Which replica a row goes to: the least busy, or the one that holds its prefix."""

from pipemax.generation import GenerationRequest, Message
from pipemax.replicas.routing import Router, prefix_keys

DOCUMENT = "The document says much. " * 100  # 2,400 characters
OTHER = "Another one says less. " * 100


def keys(prompt: str):  # type: ignore[no-untyped-def]
    return prefix_keys(GenerationRequest(request_id="row", prompt=prompt))


def test_a_row_goes_to_the_least_busy_replica_and_to_the_first_of_equals() -> None:
    router = Router()
    assert router.choose(keys("short"), {1: 50.0, 2: 20.0, 3: 30.0}) == 2
    assert router.choose(keys("short"), {1: 20.0, 2: 20.0}) == 1


def test_rows_with_a_prefix_go_where_it_was_although_another_replica_has_a_little_less_to_do() -> None:
    router = Router()
    assert router.choose(keys(DOCUMENT + "Who?"), {1: 100.0, 2: 0.0}) == 2
    assert router.choose(keys(DOCUMENT + "When?"), {1: 100.0, 2: 500.0}) == 2  # it saves 512 tokens
    assert router.choose(keys(OTHER + "When?"), {1: 100.0, 2: 500.0}) == 1


def test_a_replica_too_busy_for_its_prefix_shares_it_with_the_least_busy_one() -> None:
    router = Router()
    router.choose(keys(DOCUMENT), {1: 0.0, 2: 10.0})
    assert router.choose(keys(DOCUMENT), {1: 700.0, 2: 10.0}) == 2
    assert router.choose(keys(DOCUMENT), {1: 30.0, 2: 10.0}) == 2, (
        "both hold it, so the less busy one is taken"
    )


def test_the_longest_prefix_decides_where_all_rows_share_a_short_one() -> None:
    router = Router()
    head = "Answer in one word. " * 20  # 400 characters
    router.choose(keys(head + DOCUMENT), {1: 0.0, 2: 1.0})
    router.choose(keys(head + OTHER), {1: 900.0, 2: 1.0})
    assert router.choose(keys(head + DOCUMENT), {1: 300.0, 2: 200.0}) == 1
    assert router.choose(keys(head + OTHER), {1: 200.0, 2: 300.0}) == 2


def test_a_replica_that_lost_its_kv_is_preferred_no_more() -> None:
    router = Router()
    router.choose(keys(DOCUMENT), {1: 0.0, 2: 1.0})
    router.forget(1)
    assert router.choose(keys(DOCUMENT), {1: 100.0, 2: 0.0}) == 2


def test_a_replica_that_is_away_gets_nothing() -> None:
    router = Router()
    router.choose(keys(DOCUMENT), {1: 0.0, 2: 1.0})
    assert router.choose(keys(DOCUMENT), {2: 1_000.0, 3: 900.0}) == 3


def test_a_prefix_has_the_system_message_before_the_prompt_or_the_messages() -> None:
    plain = GenerationRequest(request_id="1", prompt=DOCUMENT, system="Be brief.")
    turns = GenerationRequest(
        request_id="2", messages=(Message(role="user", content=DOCUMENT),), system="Be brief."
    )
    assert prefix_keys(plain) == prefix_keys(turns) != keys(DOCUMENT)
    assert [key.chars for key in prefix_keys(plain)] == [2048, 1024, 512, 256]
    assert keys("short") == ()
