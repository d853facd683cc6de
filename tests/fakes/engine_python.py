"""What stands in for an engine environment's ``python``: the real server around the fake engine.

``write_engine_python`` writes an executable to be named as ``engine_python``. It answers ``-m pipemax.serve ...``
with the real server's ``main``, and ``-m pipemax preflight`` with a small plausible one; it knows nothing else.
"""

import hashlib
import os
import shlex
import stat
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace

ENGINE_ENVIRONMENT_VARIABLE = "PIPEMAX_TEST_ENGINE_PYTHON"
"""Names the interpreter whose environment has the engine's packages, for tests that run in one without them."""
CUT_OFF = "--cut-off"
_REPOSITORY = Path(__file__).resolve().parents[2]

_SCRIPT = """#!{interpreter}
import sys
sys.path[:0] = [{repository!r}, {engine!r}]
from tests.fakes.engine_python import main
main(sys.argv[1:], server_flags={server_flags!r})
"""


def write_engine_python(path: Path, *server_flags: str) -> str:
    """Write the executable; ``server_flags`` such as ``--idle-exit-s=2`` are added to the server's own.

    With ``CUT_OFF`` among them, the driver cannot be reached from the server, as behind a firewall.
    """
    interpreter = os.environ.get(ENGINE_ENVIRONMENT_VARIABLE, sys.executable)
    assert " " not in interpreter, "a '#!' line cannot name an interpreter with a space in its path"
    script = _SCRIPT.format(
        interpreter=interpreter,
        repository=str(_REPOSITORY),
        engine=str(_REPOSITORY / "engine"),
        server_flags=list(server_flags),
    )
    path.write_text(script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def main(arguments: Sequence[str], *, server_flags: Sequence[str] = ()) -> None:
    match arguments:
        case ["-m", "pipemax.serve", *rest]:
            from pipemax.serve.main import main as serve

            if CUT_OFF in server_flags:
                _cut_off_from_driver()
            serve(
                [*rest, *(flag for flag in server_flags if flag != CUT_OFF)], load_factory=_load_fake_engine
            )
        case ["-m", "pipemax", "preflight"]:
            sys.stdout.buffer.write(_preflight(sys.stdin.buffer.read()) + b"\n")
        case _:
            sys.exit(f"the fake engine's python does not know: {shlex.join(arguments)}")


def _cut_off_from_driver() -> None:
    """Send no call of the reporter's. A short timeout would not do: a report may arrive although its sender gave up."""
    from pyarrow import flight

    from pipemax.serve import collector_reports

    class Unreachable:
        def __init__(self, location: str, **_: object) -> None:
            raise OSError(f"no route to {location}")

    collector_reports.flight = SimpleNamespace(FlightClient=Unreachable, FlightError=flight.FlightError)


def _load_fake_engine():  # type: ignore[no-untyped-def]
    from pipemax.replicas.replica_set import ReplicaSet
    from tests.fakes.engine import FakeEngine
    from tests.fakes.replica_child import COMMAND
    from tests.fakes.virtual_engine import VirtualEngine

    def start(config):  # type: ignore[no-untyped-def]
        if config.num_replicas > 1:
            return ReplicaSet(config, command=COMMAND)
        return VirtualEngine(config) if "virtual" in config.vllm else FakeEngine(config)

    return start


def _preflight(text: bytes) -> bytes:
    """As ``pipemax preflight``: checks config and generation, counts the prompts' words as tokens."""
    from pipemax.checkpoint.model_tasks import check_tasks
    from pipemax.config import EngineConfig
    from pipemax.node.gpus import pipeline_parallel_size, visible_gpus
    from pipemax.wire import PACKAGE_VERSION, PreflightReply, PreflightRequest
    from tests.fakes.engine import DEFAULT_MAX_MODEL_LEN, count_tokens

    request = PreflightRequest.from_bytes(text)
    try:
        config = EngineConfig.parse(request.engine)
        pipeline_parallel_size(config, num_gpus=len(visible_gpus(os.environ)))
        for generation in (request.generation, *request.questions):
            check_tasks(config, [generation.sampling()])
    except ValueError as error:
        return PreflightReply(error=str(error)).to_bytes()
    system = f"{request.generation.system} " if request.generation.system else ""
    prompts = [f"{system}{_text(one)}" for one in request.requests]
    counts = [count_tokens(prompt) for prompt in prompts]
    lengths = {"prompt_tokens": counts, "max_tokens": request.generation.max_tokens, "rows": request.rows}
    return PreflightReply(
        model=config.model,
        model_fingerprint=hashlib.sha256(f"{config.model}@{config.revision}".encode()).hexdigest()[:16],
        max_model_len=config.max_model_len or DEFAULT_MAX_MODEL_LEN,
        prompt_tokens=counts,
        shared_prefix_tokens=_shared_words(prompts),
        output_tokens=[request.generation.max_tokens] * len(counts),
        row_lengths=lengths if config.policy == "auto" and counts else None,
        first_prompt=prompts[0] if prompts else "",
        expected_rows=_expected_rows(config, prompts),
        engine=_without_own_settings(config.model_dump(mode="json")),
        versions={"pipemax-spark": PACKAGE_VERSION, "vllm": "fake"},
    ).to_bytes()


def _shared_words(prompts):  # type: ignore[no-untyped-def]
    """How many words all prompts begin with."""
    if len(prompts) < 2:
        return 0
    first, last = min(texts := [prompt.split() for prompt in prompts]), max(texts)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))


def _text(request):  # type: ignore[no-untyped-def]
    """What a request says, as the fake engine reads it."""
    turns = request.get("messages") or ()
    return request.get("prompt") or "\n".join(turn["content"] or "" for turn in turns)


def _without_own_settings(engine):  # type: ignore[no-untyped-def]
    """How fast a fake is, and how it fails, is no setting of vLLM's and decides no answer: no spec shall hold it."""
    return {
        **engine,
        "vllm": {name: value for name, value in engine["vllm"].items() if name not in ("fake", "virtual")},
    }


def _expected_rows(config, prompts):  # type: ignore[no-untyped-def]
    from tests.fakes.virtual_engine import rows_in_host_pool

    return rows_in_host_pool(config, prompts) if "virtual" in config.vllm and prompts else None
