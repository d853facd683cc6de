"""A reasoning parser for the demo model, which vLLM loads as a plugin: its thinking is ``{"section``, up to ``":``.

It thinks only if the chat template's variables say ``thinking``, as DeepSeek's models do.
"""

from collections.abc import Sequence
from typing import Any

from vllm.reasoning import ReasoningParser, ReasoningParserManager

NAME = "demo"
START, END = '{"', '":'


class DemoReasoningParser(ReasoningParser):
    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        self._thinks = bool((kwargs.get("chat_template_kwargs") or {}).get("thinking"))
        (self._end_id,) = tokenizer.encode(END, add_special_tokens=False)

    @property
    def reasoning_start_str(self) -> str:
        return START

    @property
    def reasoning_end_str(self) -> str:
        return END

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        # As most of vLLM's parsers do, it looks for the end anywhere in the prompt.
        return not self._thinks or self._end_id in input_ids

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Any) -> bool:
        return not self._thinks or self._end_id in delta_ids

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        return input_ids[input_ids.index(self._end_id) + 1 :] if self._end_id in input_ids else []

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        if not self._thinks:
            return None, model_output
        thought, mark, answer = model_output.partition(END)
        return thought, answer or None if mark else None

    def extract_reasoning_streaming(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("no answer is streamed")


ReasoningParserManager.register_module(name=NAME, module=DemoReasoningParser)
