"""What virtual workers know of requests: which tokens they make, and what a step computes."""

import pytest

from lab.virtual_node.sequences import END_TOKEN, ScheduledTokens, Sequences

PROMPT = list(range(100, 140))


def make_sequences(*names: str, num_outputs: int = 4) -> Sequences:
    sequences = Sequences(vocab_size=1000, block_tokens=16)
    for name in names:
        start(sequences, name, PROMPT, num_outputs=num_outputs)
    return sequences


def start(sequences: Sequences, name: str, tokens: list[int], *, num_outputs: int = 4) -> None:
    sequences.start(name, tokens, num_prompt=len(PROMPT), num_outputs=num_outputs, blocks=[[3, 1, 2]])


def sampled(sequences: Sequences, name: str, first: int, num: int) -> list[int]:
    return sequences.run([ScheduledTokens(request_id=name, first=first, num=num)]).sampled[name]


def test_a_prompt_in_chunks_makes_a_token_with_its_last_chunk() -> None:
    sequences = make_sequences("a")
    assert sampled(sequences, "a", 0, 30) == []
    assert len(sampled(sequences, "a", 30, 10)) == 1


def test_an_output_ends_at_the_length_that_the_workload_says() -> None:
    sequences = make_sequences("a")
    outputs = sampled(sequences, "a", 0, 40)
    for position in range(40, 43):
        outputs += sampled(sequences, "a", position, 1)
    assert outputs[-1] == END_TOKEN
    assert END_TOKEN not in outputs[:-1]


def test_a_request_that_is_computed_again_makes_the_same_tokens() -> None:
    sequences = make_sequences("a", "b")
    first = sampled(sequences, "a", 0, 40)
    second = sampled(sequences, "a", 40, 1)
    start(sequences, "a", PROMPT + first)
    assert sampled(sequences, "a", 0, 41) == second
    assert sampled(sequences, "b", 0, 40) == first  # the same prompt


def test_a_steps_work_is_that_of_its_parts() -> None:
    sequences = make_sequences("a", "b")
    sampled(sequences, "a", 0, 40)
    parts = [
        ScheduledTokens(request_id="a", first=40, num=1),
        ScheduledTokens(request_id="b", first=0, num=30),
    ]
    work = sequences.run(parts).work
    assert (work.decode_requests, work.decode_context_tokens) == (1, 40)
    assert (work.prefill_tokens, work.prefill_pairs, work.prefill_outputs) == (30, 30 * 31 / 2, 0)


def test_tokens_and_blocks_that_are_not_there_are_errors() -> None:
    sequences = make_sequences("a")
    with pytest.raises(AssertionError, match="beyond the 40 tokens known"):
        sampled(sequences, "a", 40, 1)
    sequences.replace_blocks("a", [[3]])
    with pytest.raises(AssertionError, match="has 1 blocks"):
        sampled(sequences, "a", 0, 40)
