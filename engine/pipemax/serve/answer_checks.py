"""Check, before any engine starts, that the model and vLLM can give the answers that a job asks for.

It needs the model's tokenizer and vLLM's files, and neither imports vLLM nor loads weights.
"""

import ast
import re
from functools import partial
from importlib import util
from pathlib import Path
from typing import Any

from pipemax.answers.choice_tree import MOST_SCORED, ChoiceTree
from pipemax.answers.row import TOO_MANY_TO_SCORE
from pipemax.checkpoint.prompt_encoder import template_variables
from pipemax.checkpoint.special_tokens import SpecialTokens
from pipemax.config import ChatMode, EngineConfig
from pipemax.generation import Sampling

_SET_BY_PIPEMAX = {"messages", "tokenize", "add_generation_prompt", "chat_template", "return_dict"}
_SETTINGS_OF_APPLY = {"documents", "tools", "continue_final_message"}
"""Arguments of ``apply_chat_template`` that reach the template under their own names."""


def check_answers(config: EngineConfig, sampling: Sampling, tokenizer: Any, *, has_template: bool) -> None:
    """Raise ``ValueError`` if this model cannot give such answers."""
    _check_choices(sampling, tokenizer)
    _check_variables(sampling, tokenizer, has_template=has_template)
    for name in ("include_reasoning", "thinking_tokens"):
        if getattr(sampling, name) is not None and config.reasoning_parser is None:
            raise ValueError(
                f"{name} is given, and nothing splits off the model's thinking; set reasoning_parser in the engine "
                f"config, or leave {name} out"
            )
    if sampling.choice and sampling.logprobs and config.vllm_arguments.get("speculative_config"):
        raise ValueError(
            "choice and logprobs are given, and speculative_config in the engine config: vLLM drops the probabilities "
            "of choices while it speculates; leave logprobs or speculative_config out"
        )
    if sampling.attempts_show_error and (not has_template or config.chat is ChatMode.NEVER):
        raise ValueError(
            "attempts_show_error continues the conversation, which needs a model with a chat template, and chat not "
            "'never'; leave it out and set a temperature above 0"
        )


def check_reasoning_parser(config: EngineConfig) -> None:
    """Raise ``ValueError`` if vLLM has no such reasoning parser."""
    name = config.reasoning_parser
    if name is None or config.vllm_arguments.get("reasoning_parser_plugin"):
        return
    known = known_reasoning_parsers()
    if known and name not in known:
        raise ValueError(f"reasoning_parser {name!r} is unknown to vLLM; it knows {', '.join(sorted(known))}")


def known_reasoning_parsers() -> set[str]:
    """Return the names of vLLM's reasoning parsers, as its source lists them; none if that cannot be read."""
    spec = util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        source = Path(folder, "reasoning", "__init__.py")
        for statement in ast.parse(source.read_text()).body if source.is_file() else ():
            match statement:
                case ast.Assign(
                    targets=[ast.Name(id="_REASONING_PARSERS_TO_REGISTER")], value=ast.Dict() as table
                ):
                    return {key.value for key in table.keys if isinstance(key, ast.Constant)}  # type: ignore[misc]
    return set()


def _check_choices(sampling: Sampling, tokenizer: Any) -> None:
    if not sampling.choice:
        return
    end = getattr(tokenizer, "eos_token_id", None)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    words = SpecialTokens(tokenizer).words
    tree = ChoiceTree.of(sampling.choice, encode, [] if end is None else [end], words)
    if sampling.logprobs and tree.most_branches > MOST_SCORED:
        raise ValueError(TOO_MANY_TO_SCORE)


def _check_variables(sampling: Sampling, tokenizer: Any, *, has_template: bool) -> None:
    variables = template_variables(sampling)
    if not variables:
        return
    if not has_template:
        raise ValueError(
            f"{', '.join(variables)} are for a chat template, which the model's tokenizer lacks; leave them out"
        )
    if reserved := sorted(variables.keys() & _SET_BY_PIPEMAX):
        raise ValueError(
            f"chat_template_kwargs sets {reserved[0]!r}, which PipeMax sets itself; leave it out"
        )
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str):  # several templates, or one that is code
        return
    unread = sorted(variables.keys() - set(re.findall(r"[A-Za-z_]\w*", template)) - _SETTINGS_OF_APPLY)
    if unread:
        raise ValueError(
            f"the model's chat template does not read {unread[0]!r}, so it would have no effect; leave it out"
        )
