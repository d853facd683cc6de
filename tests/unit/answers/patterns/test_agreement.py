"""Whatever pattern is accepted, both grammar compilers and the judge take the same texts."""

import json
import random
import re

from pipemax.answers.patterns.ecma import Characters, Choice, Node, Repeat, Sequence, parse
from pipemax.answers.patterns.plain import Reading, plain_pattern, plain_regex
from pipemax.answers.validity import fault_of
from pipemax.generation import Sampling
from tests.unit.answers.patterns.matchers import Guidance, Xgrammar, json_text

ATOMS = (
    *("a", "b", "c", "z", "0", "9", "_", "é", "ß", "λ", "😀", '"', " ", ",", "-", "&", "~", "]", "}", "'"),
    *(r"\.", r"\/", r"\-", r"\\", r"\n", r"\t", r"\$", r"\^", r"\{", r"\(", r"\cJ", r"\x41", r"\u00e9"),
    *(r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", ".", r"\u{1F600}", r"\ud83d\ude00"),
    *(
        r"\p{Lu}",
        r"\P{L}",
        r"\p{Script=Greek}",
        r"\p{Nd}",
        r"[\p{L}\d]",
        "[a-c]",
        "[^a]",
        r"[\w-]",
        r"[\]\"]",
    ),
    *(r"[^\\\"]", "[é-λ]", r"[^\s]", "[&&~~_]", r"[a\-z]", "[.]", "[^]", r"[\b\n]", r"[\d-x]", "[^^]", "[[]"),
    *(r"[\u{1F600}-\u{1F64F}]", r"[\0-\x1f]"),
)
REPETITIONS = ("*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "*?", "+?", "??", "{1,2}?", "{0}")
LETTERS = "abcz09_éßλΩ😀.-/\\\"\n\t\r ,&~]}['xA\x1f\u2028\u00a0\ufeff$^{("


def sequence(rng: random.Random, depth: int) -> str:
    parts = []
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        part = rng.choice(ATOMS)
        if depth and rng.random() < 0.3:
            options = [sequence(rng, depth - 1) for _ in range(rng.choice((1, 2, 2, 3)))]
            options += [""] * (rng.random() < 0.1)
            part = f"{rng.choice(('(', '(?:', f'(?<n{rng.randrange(999)}>'))}{'|'.join(options)})"
        parts.append(part + rng.choice(REPETITIONS) * (rng.random() < 0.3))
    return "".join(parts)


def random_pattern(rng: random.Random) -> str:
    pattern = sequence(rng, 2)
    if rng.random() < 0.3:
        pattern += f"|{sequence(rng, 1)}"
    forms = (f"^(?:{pattern})$",) * 5 + (f"^{pattern}", f"{pattern}$", f"(?:^|,){pattern}", pattern)
    return rng.choice(forms)


def matched(node: Node, rng: random.Random) -> str:
    """Return a text that a tree without its anchors matches."""
    match node:
        case Characters(ranges):
            fitting = [each for each in LETTERS if any(first <= ord(each) <= last for first, last in ranges)]
            return rng.choice(fitting) if fitting else chr(ranges[0][0])
        case Sequence(parts):
            return "".join(matched(part, rng) for part in parts)
        case Choice(options):
            return matched(rng.choice(options), rng)
        case Repeat(part, least, most):
            times = rng.randint(least, min(least + 2, least + 2 if most is None else most))
            return "".join(matched(part, rng) for _ in range(times))
    return ""


def texts_for(pattern: str, rng: random.Random) -> list[str]:
    """Return texts of which some match, some nearly do, and most do not."""
    texts = ["".join(rng.choices(LETTERS, k=rng.choice((0, 1, 1, 2, 2, 3, 4)))) for _ in range(6)]
    fitting = [matched(parse(pattern), rng)[:40] for _ in range(6)]
    return [
        *texts,
        *fitting,
        *(text[:-1] for text in fitting[:2]),
        *(f"{rng.choice(LETTERS)}{text}" for text in fitting[:2]),
    ]


def judged(schema: str, value: object) -> bool:
    return fault_of(json_text(value), "stop", Sampling(response_format=schema)) is None


def test_both_compilers_and_the_judge_take_the_same_texts() -> None:
    rng = random.Random(44)
    readings = dict.fromkeys(Reading, 0)
    took = {True: 0, False: 0}
    for _ in range(70):
        pattern = random_pattern(rng)
        schema = {"type": "string", "pattern": pattern}
        plain = plain_pattern(pattern)
        readings[plain.by_xgrammar] += 1
        if plain.whole is None:
            continue
        guidance = Guidance(schema=json.dumps(schema | {"pattern": plain.whole}))
        xgrammar = plain.by_xgrammar and Xgrammar(schema=json.dumps(schema | {"pattern": plain.for_xgrammar}))
        for text in texts_for(pattern, rng):
            if (
                "\0" in text or "\x7f" in text
            ):  # the first is never generated, the second one written as an escape
                continue
            expected = judged(json.dumps(schema), text)
            took[expected] += 1
            assert guidance.takes(json_text(text)) == expected, (pattern, text)
            if xgrammar:
                is_left_out = plain.by_xgrammar is not Reading.ALL and json_text(text) != f'"{text}"'
                assert xgrammar.takes(json_text(text)) == (expected and not is_left_out), (pattern, text)
    assert min(readings.values()) > 3, readings
    assert min(took.values()) > 200, took


def test_a_regex_for_the_whole_answer_means_the_same_to_xgrammar() -> None:
    rng = random.Random(45)
    for _ in range(50):
        pattern = random_pattern(rng)
        found = plain_pattern(f"^(?:{pattern.removeprefix('^').removesuffix('$')})$").searched
        xgrammar = Xgrammar(regex=plain_regex(pattern.removeprefix("^").removesuffix("$")))
        for text in texts_for(pattern, rng):
            if "\0" not in text:
                assert xgrammar.takes(text) == bool(re.search(found, text)), (pattern, text)
