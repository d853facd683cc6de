"""Rows that cannot be done, through real Spark: each has its code, and its neighbours have their answers."""

import pytest

from pipemax.wire import ErrorCode
from pipemax_spark.request.prompts import PromptSource
from tests.fakes.settings import expected_text
from tests.spark.conftest import Jobs

NAN = float("nan")

# (prompt, temperature, top_p, max_tokens) → the error's code and a part of its message; None for a good row
TABLE: list[tuple[bytes | None, float | None, float | None, int | None, tuple[ErrorCode, str] | None]] = [
    (b"fine", None, None, None, None),
    (None, None, None, None, (ErrorCode.EMPTY_PROMPT, "prompt is")),
    (b"", None, None, None, (ErrorCode.EMPTY_PROMPT, "prompt is")),
    (b" \t\n ", None, None, None, (ErrorCode.EMPTY_PROMPT, "prompt is")),
    (b"word " * 5_000, None, None, None, (ErrorCode.PROMPT_TOO_LONG, "5000 tokens, max_model_len is 4096")),
    (b"caf\xe9", None, None, None, (ErrorCode.INVALID_PROMPT, "the text is not UTF-8")),
    (b"\xff\xfe\x00", None, None, None, (ErrorCode.INVALID_PROMPT, "the text is not UTF-8")),
    (b"nul \x00 bell \x07 escape \x1b[31m", None, None, None, None),
    ("\ufeff\u200b\u202e \U0001f600 \ufffd".encode(), None, None, None, None),
    (b"<|endoftext|><|im_start|>system <s>[INST] </s>", None, None, None, None),
    (b"a", NAN, None, None, (ErrorCode.INVALID_PARAMETER, "temperature is nan")),
    (b"b", None, NAN, None, (ErrorCode.INVALID_PARAMETER, "top_p is nan")),
    (b"c", float("inf"), None, None, (ErrorCode.INVALID_PARAMETER, "temperature is inf")),
    (b"d", None, None, 0, (ErrorCode.INVALID_PARAMETER, "max_tokens is 0")),
    (b"fine too", 0.0, 1.0, 2, None),
]


@pytest.mark.long  # tests/unit/spark/test_row_fuzz.py has the rows
def test_each_bad_row_has_its_code_and_the_others_their_answers(run: Jobs) -> None:
    rows = [(i, raw, (t, p, m)) for i, (raw, t, p, m, _) in enumerate(TABLE)]
    schema = "id long, raw binary, sampling struct<temperature: double, top_p: double, max_tokens: int>"
    run.write_input(rows, schema)
    summary = run.run(
        source=PromptSource(prompt_column="raw"), overrides_column="sampling", id_columns=("id",)
    )
    assert summary.rows_error == sum(expected is not None for *_, expected in TABLE)
    done = {row["id"]: row for row in run.rows()}
    assert len(done) == len(TABLE)
    for i, (raw, _, _, max_tokens, expected) in enumerate(TABLE):
        annotation = done[i]["annotation"]
        assert done[i]["raw"] == raw, "the row's own columns are as they were"
        if expected is None:
            assert annotation["error"] is None
            assert annotation["text"] == expected_text((raw or b"").decode(), max_tokens or 16)
            continue
        code, told = expected
        assert (annotation["error"]["code"], annotation["text"]) == (code, None), raw
        assert told in annotation["error"]["message"]
    for code in {expected[0] for *_, expected in TABLE if expected}:
        assert code in run.printed
