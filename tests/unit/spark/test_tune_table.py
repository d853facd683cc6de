"""What ``pipemax tune`` prints: rates, equal answers with their interval, and lines for an engine config."""

import yaml

from pipemax_spark.job.tune import table, variants
from pipemax_spark.report.side_by_side import Answered, TriedRow


def answered(texts: list[str | None], *, seconds: float) -> Answered:
    """Rows with these answers; None is a row with an error."""
    rows = [
        TriedRow(
            number=number,
            prompt="p",
            answers={"annotation": text},
            errors={} if text is not None else {"annotation": ("too_long", "it is")},
            prompt_tokens=1,
            completion_tokens=1,
            seconds=seconds,
        )
        for number, text in enumerate(texts, 1)
    ]
    return Answered(rows)


def test_rates_equal_answers_and_reasons_stand_behind_the_lines_of_a_config() -> None:
    base = answered(["a", "b", "c", "d", None], seconds=10.0)
    faster = answered(["a", "b", "x", "d", "e"], seconds=5.0)
    again = answered(["a", "b", "c", "d", None], seconds=8.0)
    lines = table(base, again, [("kv_cache_dtype: fp8", faster), ("quantization: fp8", "no such GPU")])
    by_name = {line.split("  ")[0]: line.split() for line in lines[1:-1]}
    assert by_name["(none)"][1:] == ["0.5"]
    assert by_name["kv_cache_dtype: fp8"][2:] == ["1.0", "2.00", "75.0%", "(30.1%", "to", "95.4%)", "of", "4"]
    assert lines[3].endswith("  not here: no such GPU")
    assert by_name["(none, again)"][2:6] == ["0.6", "1.25", "100.0%", "(51.0%"]
    assert "by a factor of 1.25" in lines[-1]


def test_each_variant_is_the_config_with_the_line_that_is_shown() -> None:
    config = {"model": "m", "policy": "auto", "vllm": {"seed": 7}}
    for variant in variants(config):
        (name, value) = next(iter(yaml.safe_load(variant.line).items()))
        changed = {**config["vllm"], **value} if name == "vllm" else value
        assert variant.engine == {**config, name: changed}
    assert len(list(variants(config))) == 3


def test_what_a_config_has_already_is_no_variant() -> None:
    config = {"kv_cache_dtype": "auto", "vllm": {"quantization": "gptq"}}
    assert [variant.line.partition(":")[0] for variant in variants(config)] == ["vllm"]
    assert "speculative_config" in next(variants(config)).line
