"""Turn one row into asks, and their replies into the row's completion.

Each sample is a generator: it yields asks, gets the replies, and returns an outcome. A sample is tried again
while its answer is invalid or cut and attempts are left. It decides only; ``pipemax.vllm_ext`` sends the asks.

Every seed is derived from the row's, so that the same row gives the same answers whatever else runs.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

from pipemax.answers.asks import Ask, Prompt, Reply, Split
from pipemax.answers.choice_tree import MOST_ALLOWED, MOST_SCORED, ChoiceTree, Node
from pipemax.answers.field_chances import field_probabilities
from pipemax.answers.validity import CUT, fault_of, vote_of
from pipemax.generation import Completion, GenerationRequest, Message, RequestError, Sampling
from pipemax.wire import ErrorCode

TOO_MANY_TO_SCORE = (
    f"more than {MOST_SCORED} choices part at one place, and logprobs can score at most {MOST_SCORED}; leave logprobs "
    "out, or ask in two steps"
)


class Thinking(Protocol):
    """How the model's outputs are split into thinking and answer."""

    def is_over(self, prompt: Sequence[int], sampling: Sampling) -> bool:
        """Tell whether an answer begins right after this prompt, because thinking is off or was ended in it."""

    def split(self, prompt: Sequence[int], reply: Reply, sampling: Sampling) -> Split: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTools:
    """What a row needs of the engine."""

    encode: Callable[[GenerationRequest], Prompt | RequestError]
    tree_of: Callable[[tuple[str, ...]], ChoiceTree] | None = None
    """``ValueError`` if the choices cannot be told apart. None where a server chooses."""
    thinking: Thinking | None = None
    fault_of_length: Callable[[Sequence[int]], RequestError | None] = lambda token_ids: None
    """The error of a prompt that leaves no room for an output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """How one attempt ended."""

    answer: Completion
    """Without what only all samples together tell."""
    fault: str | None = None
    """Why it is worth another attempt: what is wrong with the answer."""


_Asking = Generator[list[Ask], list[Reply], _Outcome]


class Row:
    """One row, from its first ask to its completion."""

    def __init__(self, request: GenerationRequest, prompt: Prompt, tools: RowTools) -> None:
        self._request = request
        self._sampling = request.sampling
        self._prompt = prompt
        self._tools = tools
        self._prompt_tokens = len(prompt.token_ids)
        self._ask_numbers = count()
        self._samples = [self._sample(number) for number in range(request.sampling.n)]
        self._outcomes: dict[int, _Outcome] = {}
        self._open: dict[str, tuple[int, int]] = {}  # ask id → (sample, its place in the sample's asks)
        self._replies: dict[int, list[Reply | None]] = {}  # sample → the replies to its asks
        self.completion: Completion | None = None
        """The row's, once no ask is open."""

    @property
    def open_asks(self) -> list[str]:
        return list(self._open)

    def begin(self) -> list[Ask]:
        """Return the first asks."""
        asks = [ask for number in range(len(self._samples)) for ask in self._resume(number, None)]
        self._finish()
        return asks

    def take(self, ask_id: str, reply: Reply) -> list[Ask]:
        """Take in the reply to an open ask. Return the next asks; without open asks there is a completion."""
        sample, place = self._open.pop(ask_id)
        self._prompt_tokens = self._prompt_tokens if reply.prompt_tokens is None else reply.prompt_tokens
        of_sample = self._replies[sample]
        of_sample[place] = reply
        complete = [reply for reply in of_sample if reply is not None]
        if len(complete) < len(of_sample):
            return []
        asks = self._resume(sample, complete)
        self._finish()
        return asks

    def _resume(self, number: int, replies: list[Reply] | None) -> list[Ask]:
        sample = self._samples[number]
        try:
            asks = next(sample) if replies is None else sample.send(replies)
        except StopIteration as end:
            self._outcomes[number] = end.value
            return []
        self._replies[number] = [None] * len(asks)
        self._open |= {ask.ask_id: (number, place) for place, ask in enumerate(asks)}
        return asks

    # One sample.

    def _sample(self, number: int) -> _Asking:
        prompt, sampling = self._prompt, self._sampling
        if sampling.attempts == 1:
            return (yield from self._attempt(prompt, number, 1))
        spent = spent_thinking = 0
        for attempt in range(1, sampling.attempts + 1):
            outcome = yield from self._attempt(prompt, number, attempt)
            spent += outcome.answer.completion_tokens
            spent_thinking += outcome.answer.reasoning_tokens or 0
            answer = replace(outcome.answer, attempts=attempt, completion_tokens=spent)
            if answer.reasoning_tokens is not None:
                answer = replace(answer, reasoning_tokens=spent_thinking)
            outcome = replace(outcome, answer=answer)
            if outcome.fault is None:
                break
            if sampling.attempts_show_error and attempt < sampling.attempts:
                shown = self._tools.encode(_with_fault(self._request, outcome))
                if isinstance(shown, RequestError):  # it is too long, for instance
                    break
                prompt = shown
        return outcome

    def _attempt(self, prompt: Prompt, sample: int, attempt: int) -> _Asking:
        sampling, thinking = self._sampling, self._tools.thinking
        tree = self._tree()
        if tree is None and sampling.choice and sampling.logprobs and self._tools.tree_of is not None:
            raise ValueError(TOO_MANY_TO_SCORE)
        if tree is not None and (thinking is None or thinking.is_over(prompt.token_ids, sampling)):
            return (yield from self._choose(tree, prompt, sample, attempt))
        (reply,) = yield [self._ask(prompt, sample, attempt)]
        outcome = self._judged(prompt, reply)
        if reply.chances is not None and outcome.answer.error is None:
            return replace(outcome, answer=_chosen(outcome.answer, outcome.answer.text, reply.chances))
        if tree is None or not sampling.logprobs or outcome.answer.error is not None:
            return outcome
        # It has thought: the choices' probabilities are those behind its thinking.
        thought = len(reply.token_ids) - self._split(prompt, reply).answer_tokens
        chosen = yield from self._choose(tree, prompt.followed_by(reply.token_ids[:thought]), sample, attempt)
        if chosen.answer.error is not None:
            return chosen
        text = chosen.answer.text if sampling.temperature == 0.0 else outcome.answer.text
        chances = dict(chosen.answer.probabilities or ())
        return replace(outcome, answer=_chosen(outcome.answer, text, chances))

    def _tree(self) -> ChoiceTree | None:
        """Return the choices as a tree, or None if there are none or vLLM cannot choose among so many at once."""
        if not self._sampling.choice or self._tools.tree_of is None:
            return None
        tree = self._tools.tree_of(self._sampling.choice)
        limit = MOST_SCORED if self._sampling.logprobs else MOST_ALLOWED
        return tree if tree.most_branches <= limit else None

    def _choose(self, tree: ChoiceTree, prompt: Prompt, sample: int, attempt: int) -> _Asking:
        """Ask where the choices part: on the answer's way, or everywhere if each choice's probability is wanted."""
        replies_of: dict[int, Reply] = {}
        wants_all = self._sampling.logprobs
        # The first ask computes the prompt; the others then find it in the prefix cache.
        steps: list[list[int]] = [[0], list(range(1, len(tree.nodes)))] if wants_all else []
        place: int | str = 0
        while steps or isinstance(place, int):
            numbers = steps.pop(0) if steps else [place] if isinstance(place, int) else []
            asks = [
                self._branching(tree.nodes[number], prompt, sample, attempt, number) for number in numbers
            ]
            faults = map(self._tools.fault_of_length, (ask.prompt.token_ids for ask in asks))
            if fault := next(filter(None, faults), None):
                message = f"{fault.message}. What the choices begin with is part of these tokens"
                return _Outcome(answer=self._completion(error=replace(fault, message=message)))
            replies = (yield asks) if asks else []
            if failed := next((reply.error for reply in replies if reply.error is not None), None):
                return _Outcome(answer=self._completion(error=failed))
            replies_of |= zip(numbers, replies, strict=True)
            while not steps and isinstance(place, int) and place in replies_of:
                place = tree.nodes[place].branches[replies_of[place].token_ids[-1]]
        assert isinstance(place, str)
        answer = self._completion(text=place, finish_reason="stop", completion_tokens=len(replies_of))
        if not wants_all:
            return _Outcome(answer=answer)
        chances = tree.probabilities([replies_of[number].scores or {} for number in range(len(tree.nodes))])
        if self._sampling.temperature == 0.0:
            place = max(chances, key=lambda choice: chances[choice])
        return _Outcome(answer=_chosen(answer, place, chances))

    def _branching(self, node: Node, prompt: Prompt, sample: int, attempt: int, number: int) -> Ask:
        ask = self._ask(prompt.followed_by(node.prefix), sample, attempt, number)
        return replace(ask, allowed=tuple(node.branches), with_scores=self._sampling.logprobs)

    def _ask(self, prompt: Prompt, sample: int, attempt: int, step: int = 0) -> Ask:
        number = next(self._ask_numbers)
        # Most rows are one ask, which has the row's own id.
        name = self._request.request_id
        return Ask(
            ask_id=name if number == 0 else f"{name} ask {number}",
            prompt=prompt,
            sampling=self._sampling,
            seed=seed_of(self._sampling.seed, sample, attempt, step),
        )

    def _judged(self, prompt: Prompt, reply: Reply) -> _Outcome:
        """Turn the answer to an ask for text into an outcome."""
        if reply.error is not None:
            return _Outcome(answer=self._completion(error=reply.error))
        tokens, sampling = reply.num_tokens, self._sampling
        answer = self._completion(
            text=reply.text,
            finish_reason=reply.finish_reason,
            completion_tokens=tokens,
            token_ids=reply.token_ids,
        )
        answer_tokens = tokens
        if self._tools.thinking is not None:
            split = self._split(prompt, reply)
            answer_tokens = split.answer_tokens
            answer = replace(
                answer,
                text=split.answer,
                reasoning=split.reasoning if sampling.include_reasoning else None,
                reasoning_tokens=tokens - answer_tokens,
            )
            if split.answer is None:
                return self._unfinished(answer)
        if sampling.logprobs and not sampling.choice and reply.logprobs is not None:
            thought = tokens - answer_tokens
            logprobs = reply.logprobs[thought:]
            total = sum(logprobs)
            answer = replace(answer, logprob_sum=total, logprob_mean=total / max(1, answer_tokens))
            if sampling.response_format is not None and reply.pieces is not None:
                fields = field_probabilities(answer.text or "", reply.pieces[thought:], logprobs)
                answer = replace(answer, field_probabilities=fields)
        return self._checked(answer)

    def _unfinished(self, answer: Completion) -> _Outcome:
        tokens = answer.completion_tokens
        if answer.finish_reason == "length":
            how = (
                f"max_tokens cut the thinking after {tokens} tokens, before an answer began; raise max_tokens, or have "
                "the model think less (thinking_tokens, reasoning_effort, chat_template_kwargs)"
            )
        elif answer.finish_reason == "repetition":
            how = f"the thinking was ended after {tokens} tokens, because it repeated itself; set thinking_tokens"
        else:
            how = f"the model thought for {tokens} tokens and gave no answer"
        error = RequestError(code=ErrorCode.REASONING_UNFINISHED, message=how)
        return _Outcome(
            answer=replace(answer, error=error), fault="is missing, because the thinking took too long"
        )

    def _checked(self, answer: Completion) -> _Outcome:
        sampling, text = self._sampling, answer.text or ""
        if sampling.choice and text not in sampling.choice and text.strip() in sampling.choice:
            text = text.strip()
            answer = replace(answer, text=text)
        if sampling.response_format is not None and sampling.attempts == sampling.n == 1:
            return _Outcome(answer=answer)  # whoever parses the answer finds out
        if (fault := fault_of(text, answer.finish_reason, sampling)) is not None:
            error = RequestError(code=ErrorCode.RESPONSE_FORMAT, message=f"the output {fault}")
            return _Outcome(answer=replace(answer, error=error), fault=fault)
        # Any text is a good answer, but a whole one is worth another attempt.
        return _Outcome(answer=answer, fault=CUT.get(answer.finish_reason))

    def _split(self, prompt: Prompt, reply: Reply) -> Split:
        assert self._tools.thinking is not None
        return self._tools.thinking.split(prompt.token_ids, reply, self._sampling)

    def _completion(
        self,
        *,
        text: str | None = None,
        finish_reason: str | None = None,
        completion_tokens: int = 0,
        token_ids: tuple[int, ...] = (),
        error: RequestError | None = None,
    ) -> Completion:
        return Completion(
            request_id=self._request.request_id,
            prompt_tokens=self._prompt_tokens,
            text=text,
            finish_reason=finish_reason,
            completion_tokens=completion_tokens,
            token_ids=token_ids,
            error=error,
            reasoning_tokens=None if self._tools.thinking is None or error is not None else 0,
        )

    # All samples.

    def _finish(self) -> None:
        if len(self._outcomes) < len(self._samples):
            return
        answers = [self._outcomes[number].answer for number in range(len(self._samples))]
        self.completion = answers[0] if len(answers) == 1 else combined(answers, self._sampling)


def combined(answers: Sequence[Completion], sampling: Sampling) -> Completion:
    """Return the most frequent answer, the earliest of equally frequent ones, with all samples."""
    samples = tuple(answer.text if answer.error is None else None for answer in answers)
    votes = [None if text is None else vote_of(text, sampling) for text in samples]
    counts = Counter(vote for vote in votes if vote is not None)
    winner, frequency = counts.most_common(1)[0] if counts else (None, 0)
    chosen = answers[votes.index(winner)] if counts else answers[0]
    spent_thinking = [answer.reasoning_tokens for answer in answers if answer.reasoning_tokens is not None]
    return replace(
        chosen,
        samples=samples,
        agreement=frequency / len(answers),
        completion_tokens=sum(answer.completion_tokens for answer in answers),
        reasoning_tokens=sum(spent_thinking) if spent_thinking else None,
    )


def seed_of(seed: int | None, sample: int, attempt: int, step: int) -> int | None:
    """Return the seed of an ask: the row's own for the first, else one derived from it."""
    if seed is None or (sample, attempt, step) == (0, 1, 0):
        return seed
    content = json.dumps([seed, sample, attempt, step]).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest()) >> 1


def _with_fault(request: GenerationRequest, outcome: _Outcome) -> GenerationRequest:
    """Return the request as a conversation that goes on with the invalid answer and what is wrong with it."""
    turns = request.messages or (Message(role="user", content=request.prompt or ""),)
    answer = Message(role="assistant", content=outcome.answer.text or "…")
    remark = f"Your answer {outcome.fault}. Answer again, with nothing but a valid answer."
    return replace(request, prompt=None, messages=(*turns, answer, Message(role="user", content=remark)))


def _chosen(answer: Completion, text: str | None, chances: Mapping[str, float]) -> Completion:
    """Return the answer with this choice, and with the probability of each choice."""
    probability = None if text is None else chances.get(text)
    return replace(answer, text=text, probabilities=tuple(chances.items()), probability=probability)
