"""Make the trial of tokens in a process of its own, because vLLM takes its kernels from the environment, once.

The process reads the two engine configs and writes its result as JSON files. It starts one engine after the other.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from pipemax.config import EngineConfig
from pipemax.domain.errors import EngineStartError
from pipemax.domain.plain_values import decode, encode
from pipemax.vllm_ext.launch.known_check import TOKENS, CheckPart, Verdict
from pipemax.vllm_ext.launch.start import RunningVllm
from pipemax.vllm_ext.node_check.token_trial import ask_stock, compare_with_stock
from pipemax.vllm_ext.node_check.trial_config import TrialConfigs
from pipemax.vllm_ext.seam.vllm_types import current_platform

_CONFIGS, _RESULT = "configs.json", "part.json"


def compare_in_process(
    configs: TrialConfigs, command: Sequence[str] = (sys.executable, "-m", __name__)
) -> CheckPart:
    """Return how the tokens compare. Inconclusive if an engine does not start, or the process ends early."""
    with TemporaryDirectory(prefix="pipemax-tokens-") as directory:
        folder = Path(directory)
        engines = {"stock": configs.stock, "pipemax": configs.pipemax}
        values = {name: engine.model_dump(mode="json") for name, engine in engines.items()}
        (folder / _CONFIGS).write_text(json.dumps(values), encoding="utf-8")
        status = _run([*command, directory])
        try:
            part: CheckPart = decode(CheckPart, json.loads((folder / _RESULT).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return inconclusive(f"the process that compares them ended early with status {status}")
        return part


def inconclusive(reason: str) -> CheckPart:
    """Return the part for tokens that could not be compared."""
    return CheckPart(name=TOKENS, verdict=Verdict.INCONCLUSIVE, detail=reason)


def _run(command: Sequence[str]) -> int:
    kernels = {"VLLM_CPU_ATTN_SPLIT_KV": "0"} if current_platform.is_cpu() else {"VLLM_BATCH_INVARIANT": "1"}
    process = subprocess.Popen(command, env=os.environ | kernels)
    try:
        return process.wait()
    except BaseException:
        process.terminate()  # it closes its engine
        process.wait()
        raise


def main(arguments: Sequence[str]) -> None:
    """Compare by the configs in the folder that is the only argument; leave the result there."""
    (folder,) = map(Path, arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    values = json.loads((folder / _CONFIGS).read_text(encoding="utf-8"))
    stock, pipemax = EngineConfig.parse(values["stock"]), EngineConfig.parse(values["pipemax"])
    try:
        with _running(stock) as vllm:
            answers = ask_stock(vllm.engine, vllm.vllm_config)
        with _running(pipemax) as vllm:
            part = compare_with_stock(answers, vllm.engine, vllm.vllm_config, pipemax)
    except EngineStartError as error:
        part = inconclusive(f"an engine to compare by did not start ({error})")
    (folder / _RESULT).write_text(json.dumps(encode(part)), encoding="utf-8")


@contextmanager
def _running(config: EngineConfig) -> Iterator[RunningVllm]:
    vllm = RunningVllm.start(config)
    try:
        yield vllm
    finally:
        vllm.close()


if __name__ == "__main__":  # vLLM may spawn its processes: without this guard each would compare
    main(sys.argv[1:])
