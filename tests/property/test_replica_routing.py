"""Whatever rows come: each goes to exactly one replica that is there, and none gets far more work than another."""

from hypothesis import given
from hypothesis import strategies as st

from pipemax.generation import GenerationRequest, Sampling
from pipemax.replicas.routing import CHARS_PER_TOKEN, UNEVENNESS, Router, prefix_keys
from pipemax.replicas.row_book import RowBook
from pipemax.replicas.row_estimates import RowEstimates

PREFIXES = ("", "a" * 300, "b" * 1_100, "a" * 300 + "c" * 2_000)

rows = st.lists(st.tuples(st.integers(1, 2_000), st.sampled_from(PREFIXES)), max_size=200)


@given(rows, st.integers(1, 8))
def test_no_replica_lies_further_above_another_than_a_prefix_and_a_row_are_worth(
    rows: list[tuple[int, str]], num_replicas: int
) -> None:
    router = Router()
    work = dict.fromkeys(range(1, num_replicas + 1), 0.0)
    for number, (tokens, prefix) in enumerate(rows):
        chosen = router.choose(
            prefix_keys(GenerationRequest(request_id=str(number), prompt=f"{prefix}{number}")), work
        )
        work[chosen] += tokens
        saved = max(map(len, PREFIXES)) / CHARS_PER_TOKEN
        mean = sum(work.values()) / num_replicas
        assert max(work.values()) - min(work.values()) <= 2_000 + saved + UNEVENNESS * mean


@given(st.data(), st.integers(1, 4))
def test_every_row_is_in_one_place_until_it_ends_whatever_dies(
    data: st.DataObject, num_replicas: int
) -> None:
    replicas = list(range(1, num_replicas + 1))
    book, router = RowBook(replicas), Router()
    sent: dict[str, tuple[int, str]] = {}  # row -> (replica, name)
    added, ended = 0, set()
    for action in data.draw(st.lists(st.sampled_from(["add", "send", "end", "remove", "lose"]), max_size=60)):
        if action == "add":
            added += 1
            book.add(GenerationRequest(request_id=str(added), prompt="x"), float(added))
        elif action == "send":
            for row in book.take_waiting():
                if not data.draw(st.booleans()):
                    continue
                replica = router.choose(row.prefixes, {r: book.work_tokens(r) for r in replicas})
                sent[row.request.request_id] = replica, book.send(row, replica)
        elif action == "lose":
            replica = data.draw(st.sampled_from(replicas))
            lost = {row for row, (place, _) in sent.items() if place == replica}
            book.lose(replica)
            for row in lost:
                _, name = sent.pop(row)
                assert book.end(replica, name) is None, "an answer of a replica that died is not taken"
        elif action == "end" and sent:
            row = data.draw(st.sampled_from(sorted(sent)))
            replica, name = sent.pop(row)
            request = book.end(replica, name)
            assert request is not None
            assert request.request_id == row
            assert row not in ended
            ended.add(row)
            assert book.end(replica, name) is None, "a second answer is not taken"
        elif action == "remove" and added:
            row = str(data.draw(st.integers(1, added)))
            names = book.remove([row])
            assert names == ({sent[row][0]: [sent[row][1]]} if row in sent else {})
            sent.pop(row, None)
            ended.add(row)
        book.check_integrity()
    assert len(book) == added - len(ended)


@given(st.text(max_size=50), st.integers(1, 100))
def test_a_row_is_expected_to_have_tokens_and_no_more_than_its_longest_answer(
    prompt: str, max_tokens: int
) -> None:
    sampling = Sampling(max_tokens=max_tokens)
    request = GenerationRequest(request_id="1", prompt=prompt, sampling=sampling)
    assert 1.0 <= RowEstimates().estimate(request) <= max(1, len(prompt)) + max_tokens


def test_a_row_of_a_pooling_task_is_expected_to_have_its_prompt_only() -> None:
    sampling = Sampling(task="embed")
    request = GenerationRequest(request_id="1", prompt="a" * 400, sampling=sampling)
    assert RowEstimates().estimate(request) == 100
