"""Estimate how many tokens a row will take before it is tokenized, from its length and the rows that have ended."""

from pipemax.generation import Completion, GenerationRequest

_FIRST_TOKENS_PER_CHAR = 0.25
_FIRST_OUTPUT_SHARE = 0.25
"""Of max_tokens, as everywhere before outputs were seen."""
_MEMORY = 0.99
"""Weight of the past in running means: about the last hundred rows count."""


class RowEstimates:
    """Learns tokens per character and the share of ``max_tokens`` that outputs have."""

    def __init__(self) -> None:
        self._tokens_per_char = _FIRST_TOKENS_PER_CHAR
        self._output_share = _FIRST_OUTPUT_SHARE

    def estimate(self, request: GenerationRequest) -> float:
        """Return the expected tokens of a row, prompt and output; at least one."""
        prompt_tokens = max(1.0, self._tokens_per_char * num_chars(request))
        output_tokens = 0 if request.sampling.is_pooling else request.sampling.max_tokens
        return prompt_tokens + self._output_share * output_tokens

    def learn(self, request: GenerationRequest, completion: Completion) -> None:
        """Learn from a row that has ended. Error rows say nothing about length."""
        chars = num_chars(request)
        if completion.error is not None or not chars:
            return
        per_char = completion.prompt_tokens / chars
        share = completion.completion_tokens / request.sampling.max_tokens
        self._tokens_per_char = _MEMORY * self._tokens_per_char + (1 - _MEMORY) * per_char
        self._output_share = _MEMORY * self._output_share + (1 - _MEMORY) * share


def num_chars(request: GenerationRequest) -> int:
    """Return the characters of all texts of a request."""
    of_messages = (text for message in request.messages or () for text in message.texts)
    texts = [request.system or "", request.prompt or "", *of_messages]
    return sum(len(text) for text in texts)
