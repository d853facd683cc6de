"""Patterns anywhere in a schema are read as ECMA-262 reads them, or refused by place, pattern and construct."""

import json
import re
from typing import Any

import pytest

from pipemax.answers.patterns.plain import Reading, plain_pattern, plain_regex
from pipemax.answers.patterns.schemas import for_guidance, for_xgrammar, places_of
from pipemax.answers.validity import fault_of
from pipemax.generation import Sampling
from tests.unit.answers.patterns.matchers import Guidance, Xgrammar, json_text


@pytest.mark.parametrize(
    ("pattern", "matches", "others"),
    [
        (r"^\p{L}+$", ["Größe", "λόγος"], ["a1", ""]),
        (r"^[\p{L}\p{Nd}]$", ["é", "٣", "1"], ["{", "-"]),
        (r"^\P{L}$", ["1", "!"], ["a"]),
        (r"^\p{Script=Greek}\p{sc=Han}\p{gc=Lu}$", ["λ漢A"], ["a漢A", "λ漢a"]),
        (r"^\d\w$", ["1_"], ["٣a", "1é"]),
        (r"^\s$", ["\ufeff", "\u2028", "\xa0"], ["\x85", "\x1c"]),
        (r"^a$", ["a"], ["a\n", "ab"]),
        (r"^.$", ["\x85", "x"], ["\r", "\u2028", "\n"]),
        (r"^\/\u{1F600}\ud83d\ude00\cJ\x41\u00e9$", ["/😀😀\nAé"], [""]),
        (r"^(?<year>\d{4})-(?<month_2>\d\d)$", ["2026-11"], ["2026-1"]),
        (r"^[\w-.]+$", ["a-b."], ["a b"]),
        (r"^[]|a$", ["a", "ba"], ["b"]),
        ("^https://", ['https://x/"y"'], ["http://x"]),
        ("@", ["me@x", "@"], ["me"]),
        ("^$|^no", ["", "none"], ["yes"]),
        ("(^|,)a($|,)", ["a", "b,a,c"], ["ba", "ab"]),
        ("", ["", "any\n"], []),
    ],
)
def test_a_pattern_is_ecma_262_s_to_the_judge_and_in_the_grammar(
    pattern: str, matches: list[str], others: list[str]
) -> None:
    schema = json.dumps({"type": "string", "pattern": pattern})
    guidance, sampling = Guidance(schema=for_guidance(schema)), Sampling(response_format=schema)
    for text in (*matches, *others):
        assert (fault_of(json_text(text), "stop", sampling) is None) == (text in matches), text
        assert guidance.takes(json_text(text)) == (text in matches), text


REFUSED = {
    "^(?=b)a": "the lookahead '(?='",
    "^a(?!b)": "the lookahead '(?!'",
    "(?<=a)b": "the lookbehind '(?<='",
    "(?<!a)b": "the lookbehind '(?<!'",
    r"\bfoo": r"the word boundary '\b'",
    r"(a)\1": r"the reference '\1' to a group",
    r"(?<n>a)\k<n>": r"the reference '\k' to a group",
    "a^b": "a '^' or '$' in the middle",
    "(a$)*b": "a '^' or '$' in the middle",
    "(?i)a": "the group '(?i)'",
    "(?i:a)": "the group '(?i:'",
    "(?P<n>a)": "the group '(?P<'",
    "(?>a)": "the group '(?>a'",
    "[[:alpha:]]": "a POSIX class '[:…:]'",
    r"\Aa\Z": r"the escape '\A'",
    r"\u{110000}": r"the escape '\u'",
    r"\p{Foo}": r"the property '\p{Foo}'",
    r"\p{^L}": r"the property '\p{^L}'",
    r"\pL": r"a '\p' without the name",
    "a{": "a '{' that repeats nothing",
    "a++": "a '+' that repeats nothing",
    "[b-a]": "the range 'b-a'",
    "[a": "a '[' that is not closed",
    "(a": "a '(' that is not closed",
    "a)": "a ')' that closes nothing",
    "a\\": "a '\\' at the end",
    "^[]$": "no text that it could match",
    r"^\ud83c$": "no text that it could match",
    "(" * 500 + ")" * 500: "more than 100 groups",
}


@pytest.mark.parametrize("pattern", REFUSED)
def test_what_no_grammar_can_follow_is_refused_by_name(pattern: str) -> None:
    for read in (plain_pattern, plain_regex):
        with pytest.raises(ValueError, match=re.escape(REFUSED[pattern])):
            read(pattern)


P = r"^\p{L}{2}$"
STRING: dict[str, Any] = {"type": "string", "pattern": P}


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "array", "items": STRING}, "items"),
        ({"anyOf": [STRING, {"type": "null"}]}, "anyOf/0"),
        ({"type": ["string", "null"], "pattern": P}, "its root"),
        ({"type": "array", "prefixItems": [STRING], "items": False}, "prefixItems/0"),
        ({"type": "object", "properties": {"pattern": STRING}}, "properties/pattern"),
        ({"$ref": "#/$defs/pattern", "$defs": {"pattern": STRING}}, "$defs/pattern"),
        ({"$ref": "#/own/a", "own": {"a": STRING}}, "own/a"),
        ({"type": "object", "patternProperties": {P: {"type": "integer"}}}, "patternProperties"),
        ({"type": "object", "propertyNames": {"pattern": P}}, "propertyNames"),
        ({"type": "object", "additionalProperties": STRING}, "additionalProperties"),
    ],
)
def test_a_pattern_is_read_wherever_it_stands(schema: dict[str, Any], path: str) -> None:
    text = json.dumps(schema)
    (place,) = places_of(text)
    assert place.by_xgrammar is Reading.ALL
    assert str(place).endswith(path)
    assert r"\p" not in for_xgrammar(text)
    with pytest.raises(ValueError, match=f"at {path.replace('$', '[$]')} with the lookahead"):
        places_of(text.replace(json.dumps(P), '"(?=a)"'))
    sampling, values = (
        Sampling(response_format=text),
        ["éa", ["éa"], {"éa": 1}, {"a1": 1}, {"pattern": "é"}, {}],
    )
    grammar = Xgrammar(schema=for_xgrammar(text))
    for value in values:
        if grammar.takes(json_text(value)):
            assert fault_of(json_text(value), "stop", sampling) is None, value


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": P},
        {"type": "string", "pattern": P, "enum": ["ab", "1"]},
        {"type": "string", "pattern": P, "format": "date"},
        {"$ref": "#/$defs/a", "pattern": P, "$defs": {"a": {"type": "string"}}},
        {"type": "string", "allOf": [{"pattern": P}]},
        {"type": "object", "propertyNames": {"anyOf": [{"pattern": P}]}},
        {"type": "string", "pattern": r"^\"$"},
        {"type": "string", "pattern": r"^\p{L}{60}$"},
    ],
)
def test_a_pattern_that_xgrammar_would_ignore_or_cannot_hold_is_told(schema: dict[str, Any]) -> None:
    (place,) = places_of(json.dumps(schema))
    assert place.by_xgrammar is Reading.NOTHING
    assert place.fault


def test_what_holds_no_pattern_stays_as_it_is() -> None:
    for schema in (
        {"type": "object", "properties": {"pattern": {"type": "string"}}},
        {"enum": [{"pattern": "(?=a)"}], "default": {"pattern": "("}, "examples": [{"pattern": "("}]},
        {"const": {"patternProperties": {"(": 1}}, "x-note": {"pattern": "("}},
    ):
        text = json.dumps(schema, indent=1)
        assert for_xgrammar(text) == for_guidance(text) == text
        assert not places_of(text)


def test_a_fault_names_the_pattern_that_the_user_wrote() -> None:
    for schema, value in (
        ({"type": "string", "pattern": P}, "1"),
        ({"patternProperties": {P: {}}, "additionalProperties": False}, {"1": 1}),
    ):
        fault = fault_of(json_text(value), "stop", Sampling(response_format=json.dumps(schema)))
        assert fault is not None
        assert repr(P) in fault
