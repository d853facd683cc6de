"""An engine that serves rows over a virtual node: vLLM's real engine and core process, and nothing computed.

Prompts are tokenized by the checkpoint's tokenizer; the shapes of the model, its KV and its step times are those of
the profiles. The prompt's tokens draw the answer's length, so that a rerun says the same. Its text says that nothing
was computed and lists the tokens: it is about as long as a real one, and costs no detokenizer.
"""

from array import array
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from zlib import crc32

import numpy as np
from transformers import AutoConfig
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.metrics.loggers import StatLoggerFactory

from pipemax.answers.asks import Ask
from pipemax.checkpoint.model_length import max_model_len
from pipemax.config import BatchingChoice, EngineConfig
from pipemax.domain.workload import WorkloadSpec
from pipemax.generation import EngineStats
from pipemax.node.virtual_node import VirtualNodeSetup
from pipemax.rehearsal.sequences import END_TOKEN
from pipemax.sim.measured_engine import MeasuredEngine
from pipemax.sim.workloads import draw_workload
from pipemax.vllm_ext.engine.vllm_engine import VllmEngine
from pipemax.vllm_ext.launch.start import RunningVllm
from pipemax.vllm_ext.rehearsal.executor import OUTPUT_TOKENS
from pipemax.vllm_ext.rehearsal.launch import RehearsedEngine, rehearsed_config, write_model_config
from pipemax.vllm_ext.rehearsal.served_executor import ServedNodeExecutor
from pipemax.vllm_ext.rehearsal.settings import ClockSettings

MARK = "[virtual node: nothing was computed]"
"""The beginning of every answer."""
CHUNK_TOKENS = 8192
"""Tokens in one step at most, unless the config says so: vLLM's own default for offline batches on GPUs."""
MAX_NUM_SEQS = 4096
"""Requests in one step at most, or running at once under stock vLLM, unless the config says so."""
_DRAWN_LENGTHS = 4096


class AnswerLengths:
    """How many tokens each answer has: a number, or drawn from a workload's lengths by the prompt."""

    def __init__(self, output_tokens: int | WorkloadSpec) -> None:
        if isinstance(output_tokens, int):
            self._lengths = [output_tokens]
        else:
            drawn = draw_workload(output_tokens, _DRAWN_LENGTHS, np.random.default_rng(0))
            self._lengths = drawn.output_tokens.tolist()

    def of(self, prompt: Sequence[int]) -> int:
        """Return the same length for the same prompt, in each process."""
        return self._lengths[crc32(array("i", prompt).tobytes()) % len(self._lengths)]


def _step_tokens(config: EngineConfig) -> int:
    """Return the maximum tokens of a step."""
    most_tokens = config.max_num_batched_tokens or CHUNK_TOKENS
    if config.batching is BatchingChoice.MIXED:
        return config.mixed_step_tokens or most_tokens
    return most_tokens


class VirtualVllmEngine(VllmEngine):
    """Implements ``pipemax.api.Engine`` over a virtual node."""

    def __init__(self, config: EngineConfig) -> None:
        """Block until the core runs. ``EngineStartError`` says why it does not."""
        self._directory = TemporaryDirectory(prefix="pipemax-virtual-node-")
        try:
            super().__init__(config)
        except BaseException:
            self._directory.cleanup()
            raise

    def _load(self, config: EngineConfig, stat_logger: StatLoggerFactory) -> RunningVllm:
        return RunningVllm.start(config, stat_loggers=[stat_logger], make_config=self._make_config)

    def _make_config(self, config: EngineConfig) -> VllmConfig:
        assert config.virtual_node is not None
        setup = VirtualNodeSetup.of(config)
        self._answers = AnswerLengths(setup.output_tokens)
        checkpoint = AutoConfig.from_pretrained(
            config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
        engine = RehearsedEngine(
            node=setup.node,
            model=setup.model,
            parallelism=setup.parallelism,
            policy=config.policy,
            chunk_tokens=_step_tokens(config),
            max_model_len=max_model_len(config, checkpoint),
            batching=config.batching.at_start,
            # Others take part, whose clock does not stop; what a step costs this process, steps in flight hide.
            clock=ClockSettings(stretch=config.virtual_node.stretch, never_stops=True),
            checks_kv=False,
            executor=ServedNodeExecutor,
            max_num_seqs=config.max_num_seqs or MAX_NUM_SEQS,
        )
        write_model_config(engine.model, Path(self._directory.name), max_model_len=engine.max_model_len)
        settings = {
            "model": self._directory.name,
            "tokenizer": config.tokenizer or config.model,
            "trust_remote_code": config.trust_remote_code,
            "enable_prefix_caching": config.enable_prefix_caching,
            "seed": config.seed,
        }
        return rehearsed_config(engine, settings, {"tokenizer_revision": config.revision})

    def _measure(self, config: EngineConfig) -> MeasuredEngine | None:
        return None  # its step times are the profiles', and no byte of KV could be checked

    def _sampling_params(self, ask: Ask) -> SamplingParams:
        if ask.sampling.is_constrained or ask.sampling.logprobs:
            raise ValueError(
                "a virtual node computes nothing: its answers follow no format and have no logprobs"
            )
        return SamplingParams(
            max_tokens=ask.sampling.max_tokens,
            temperature=0.0,
            ignore_eos=True,
            stop_token_ids=[END_TOKEN],
            detokenize=False,
            extra_args={OUTPUT_TOKENS: self._answers.of(ask.prompt.token_ids)},
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _text(self, sequence: CompletionOutput) -> str:
        return f"{MARK} {' '.join(map(str, sequence.token_ids))}"

    def stats(self) -> EngineStats:
        stats = super().stats()
        stats.metrics["nothing_computed"] = 1.0
        return stats

    def close(self) -> None:
        super().close()
        self._directory.cleanup()
