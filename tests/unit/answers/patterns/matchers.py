"""The two grammar compilers, each over a vocabulary of single bytes, so that any text can be tried on a grammar."""

import json
from typing import Any

import xgrammar
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

_BYTES = [bytes([number]) for number in range(1, 256)]
_COMPILER = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo([*_BYTES, b"<end>"], vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[255]),
    max_threads=1,
    cache_enabled=False,
)


class _Bytes:
    """A tokenizer as llguidance asks for one."""

    eos_token_id, bos_token_id = 256, None

    def __init__(self) -> None:
        self.tokens = [bytes([number]) for number in range(256)] + [b"<end>"]
        self.special_token_ids = [256]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


_TOKENIZER = LLTokenizer(TokenizerWrapper(_Bytes()))


class Xgrammar:
    """Whether xgrammar lets texts through, with vLLM's settings for compact JSON."""

    def __init__(self, *, schema: str | None = None, regex: str | None = None) -> None:
        self._grammar: Any = (
            _COMPILER.compile_regex(regex)
            if schema is None
            else _COMPILER.compile_json_schema(schema, any_whitespace=False, separators=(",", ":"))
        )

    def takes(self, text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(self._grammar, terminate_without_stop_token=True)
        return matcher.accept_string(text) and matcher.is_completed()


class Guidance:
    """The same for llguidance."""

    def __init__(self, *, schema: str) -> None:
        self._grammar = LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False})

    def takes(self, text: str) -> bool:
        matcher = LLMatcher(_TOKENIZER, self._grammar, log_level=0)
        assert not matcher.get_error(), matcher.get_error()
        return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


def json_text(value: object) -> str:
    """Return a value's JSON as an engine writes it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
