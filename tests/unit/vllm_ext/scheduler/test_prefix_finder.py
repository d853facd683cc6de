"""Templates are found from content hashes."""

from pipemax.vllm_ext.scheduler.prefix_finder import PrefixFinder


def hashes(text: str) -> list[bytes]:
    return [text[: index + 1].encode() for index in range(len(text))]


def found(finder: PrefixFinder, text: str) -> int | None:
    prefix = finder.find(hashes(text))
    return prefix.num_tokens if prefix else None


def test_the_second_member_of_a_family_shows_its_template() -> None:
    finder = PrefixFinder(16)
    assert found(finder, "TTTTa") is None
    assert found(finder, "TTTTb") == 64
    assert found(finder, "TTTTcde") == 64
    assert found(finder, "TTTT") == 64
    assert found(finder, "other") is None
    assert finder.find([]) is None


def test_equal_prompts_are_not_taken_for_the_template_for_long() -> None:
    finder = PrefixFinder(16)
    found(finder, "TTTTaa")
    assert found(finder, "TTTTaa") == 96
    assert found(finder, "TTTTb") == 64
    assert found(finder, "TTTTc") == 64


def test_a_prompt_that_only_shares_a_beginning_does_not_shorten_the_template() -> None:
    finder = PrefixFinder(16)
    found(finder, "TTTTTTa")
    assert found(finder, "TTTTTTb") == 96
    assert found(finder, "Tx") is None
    assert found(finder, "TTTTTTc") == 96


def test_a_template_of_one_length_has_one_id() -> None:
    finder = PrefixFinder(16)
    found(finder, "TTTTa")
    first, second = finder.find(hashes("TTTTb")), finder.find(hashes("TTTTc"))
    assert first == second is not None


def test_the_oldest_prefix_families_are_forgotten() -> None:
    finder = PrefixFinder(16)
    finder.MAX_FAMILIES = 2
    for text in ("aT", "bT", "cT"):
        found(finder, text)
    assert found(finder, "aT") is None
    assert found(finder, "cT") == 32
