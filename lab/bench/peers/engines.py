"""Systems without Spark: the engine itself, given all rows at once."""

import asyncio
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.bench.peers.load import WARM_UP_ROWS, Load
from lab.bench.peers.recorder import Recorder

if TYPE_CHECKING:
    from pipemax.api import GenerationRequest


def pipemax_requests(rows: list[dict[str, Any]]) -> "list[GenerationRequest]":
    """Return the load's rows as requests for ``OfflineEngine``."""
    from pipemax.api import GenerationRequest, Sampling

    return [
        GenerationRequest(
            request_id=str(row["id"]), prompt=row["prompt"], sampling=Sampling(max_tokens=row["max_tokens"])
        )
        for row in rows
    ]


def bare_engine(load: Load, recorder: Recorder) -> None:
    """Run PipeMax's engine as a library, under the policy that is stock vLLM: the limit of its Spark path."""
    from pipemax.api import OfflineEngine
    from pipemax.config import EngineConfig

    def run(engine: OfflineEngine, limit: int | None = None) -> dict[int, int]:
        completions = list(engine.generate(pipemax_requests(load.prompts(limit))))
        _write(load, [done.text for done in completions])
        return {int(done.request_id): done.completion_tokens for done in completions}

    begin_s = time.perf_counter()
    with OfflineEngine(EngineConfig.parse(load.pipemax_engine())) as engine:
        run(engine, WARM_UP_ROWS)
        recorder.started(time.perf_counter() - begin_s)
        for _ in range(load.repeats):
            begin_s = time.perf_counter()
            tokens_by_id = run(engine)
            recorder.ran(time.perf_counter() - begin_s, tokens_by_id)


def vllm_generate(load: Load, recorder: Recorder) -> None:
    """Run stock vLLM's ``LLM.generate`` with all rows: the upper limit for one engine."""
    begin_s = time.perf_counter()
    from vllm import LLM, SamplingParams

    def run(limit: int | None = None) -> dict[int, int]:
        rows = load.prompts(limit)
        sampling = [SamplingParams(temperature=0.0, max_tokens=row["max_tokens"]) for row in rows]
        outputs = llm.generate([row["prompt"] for row in rows], sampling, use_tqdm=False)
        _write(load, [output.outputs[0].text for output in outputs])
        return {
            row["id"]: len(output.outputs[0].token_ids) for row, output in zip(rows, outputs, strict=True)
        }

    llm = LLM(**load.vllm_arguments())
    run(WARM_UP_ROWS)
    recorder.started(time.perf_counter() - begin_s)
    for _ in range(load.repeats):
        begin_s = time.perf_counter()
        tokens_by_id = run()
        recorder.ran(time.perf_counter() - begin_s, tokens_by_id)


def vllm_run_batch(load: Load, recorder: Recorder) -> None:
    """Run ``vllm run-batch`` on an engine that stays: the command itself would start one for each table."""
    begin_s = time.perf_counter()
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.run_batch import make_arg_parser, run_batch
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    inputs, outputs = Path(load.directory) / "batch-in.jsonl", Path(load.directory) / "batch-out.jsonl"
    parser = make_arg_parser(FlexibleArgumentParser())
    arguments = parser.parse_args(["-i", str(inputs), "-o", str(outputs), *flags(load.vllm_arguments())])

    async def run(client: Any, limit: int | None = None) -> None:
        inputs.write_text("".join(json.dumps(_batch_line(load, row)) + "\n" for row in load.prompts(limit)))
        await run_batch(client, arguments)

    async def measure() -> None:
        async with build_async_engine_client(arguments) as client:
            await run(client, WARM_UP_ROWS)
            recorder.started(time.perf_counter() - begin_s)
            for _ in range(load.repeats):
                run_begin_s = time.perf_counter()
                await run(client)
                run_s = time.perf_counter() - run_begin_s
                recorder.ran(run_s, _tokens_of_batch(outputs))

    asyncio.run(measure())


def flags(arguments: dict[str, Any]) -> list[str]:
    """Return arguments of vLLM's ``LLM`` as options of its commands."""
    flags: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        match value:
            case True:
                flags.append(f"--{flag}")
            case False:
                flags.append(f"--no-{flag}")
            case _:
                flags += [f"--{flag}", str(value)]
    return flags


def _batch_line(load: Load, row: dict[str, Any]) -> dict[str, Any]:
    body = {
        "model": load.model,
        "messages": [{"role": "user", "content": row["prompt"]}],
        "max_tokens": row["max_tokens"],
        "temperature": 0,
    }
    return {"custom_id": str(row["id"]), "method": "POST", "url": "/v1/chat/completions", "body": body}


def _tokens_of_batch(outputs: Path) -> dict[int, int]:
    lines = [json.loads(line) for line in outputs.read_text().splitlines()]
    return {
        int(line["custom_id"]): line["response"]["body"]["usage"]["completion_tokens"]
        for line in lines
        if line["error"] is None
    }


def _write(load: Load, texts: list[str]) -> None:
    (Path(load.directory) / "texts.json").write_text(json.dumps(texts))
