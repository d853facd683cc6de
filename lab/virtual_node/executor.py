"""vLLM's executor over a virtual node: in place of the workers, their connectors and a clock.

``execute_model`` submits a step to all stages, as workers do that run ahead of their devices, and ``sample_tokens``
returns a future that waits until the node has run it. It stands for vLLM's V2 model runner with asynchronous
scheduling, which is what GPUs run by default.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from lab.virtual_node.sequences import RunStep, ScheduledTokens, Sequences
from lab.virtual_node.settings import RehearsalSettings
from lab.virtual_node.virtual_connector import VirtualConnector
from lab.virtual_node.virtual_device import VirtualEvent
from lab.virtual_node.virtual_node import NodeStep, VirtualNode
from pipemax.domain.specs import Parallelism
from pipemax.vllm_ext.worker.connector import StepMetadata
from pipemax.vllm_ext.worker.stage_reports import WorkerReports

OUTPUT_TOKENS = "output_tokens"
"""The name of a request's output length in its ``SamplingParams.extra_args``."""


class StepFuture(Future[ModelRunnerOutput]):
    """A step's output, for which ``result`` lets the node run and waits."""

    def __init__(self, output: ModelRunnerOutput, wait: Callable[[], None]) -> None:
        super().__init__()
        self._output = output
        self._wait = wait

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        if not self.done():
            self._wait()
            self.set_result(self._output)
        return super().result()


class VirtualNodeExecutor(Executor):
    """Runs vLLM's steps on the virtual node that the config's ``additional_config`` describes."""

    supports_pp = True
    connector_class = VirtualConnector
    """Tests put faulty ones here."""

    # -- what vLLM's core asks at its start -----------------------------------------------------------------------

    def _init_executor(self) -> None:
        additional_config = self.vllm_config.additional_config
        assert isinstance(additional_config, dict), additional_config
        settings = RehearsalSettings.from_additional_config(additional_config)
        parallel = self.parallel_config
        self._model = settings.model
        self._tensor = parallel.tensor_parallel_size
        self.node = VirtualNode(
            settings.node,
            settings.model,
            Parallelism(pipeline=parallel.pipeline_parallel_size, tensor=self._tensor),
            frees_windows=not self.scheduler_config.disable_hybrid_kv_cache_manager,
            checks_kv=settings.checks_kv,
        )
        self.clock = settings.clock.start()
        self._sequences = Sequences(
            vocab_size=settings.model.vocab_size,
            block_tokens=self.cache_config.block_size,
            lists_kv=settings.checks_kv,
        )
        self._connectors: list[VirtualConnector] = []
        self._last_done: VirtualEvent | None = None
        self._sampled: ModelRunnerOutput | None = None  # of the step that is about to be sampled
        self._host_works_since_s = 0.0

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        specs: list[dict[str, KVCacheSpec]] = []
        first = 0
        for layout, num_layers in zip(self.node.layouts, self.node.times.layers, strict=True):
            layers = range(first, first + num_layers)
            of_stage = {
                f"model.layers.{layer}.self_attn.attn": self._kv_cache_spec(layer, layout.num_kv_heads)
                for layer in layers
            }
            specs += [of_stage] * self._tensor
            first = layers.stop
        return specs

    def _kv_cache_spec(self, layer: int, num_kv_heads: int) -> KVCacheSpec:
        shape: dict[str, Any] = {
            "block_size": self.cache_config.block_size,
            "num_kv_heads": num_kv_heads,
            "head_size": self.model_config.get_head_size(),
            "dtype": kv_cache_dtype_str_to_dtype(self.cache_config.cache_dtype, self.model_config),
        }
        window_tokens = self._model.window_tokens
        keeps_windows = self.scheduler_config.disable_hybrid_kv_cache_manager
        if window_tokens is None or layer in self._model.full_layers or keeps_windows:
            return FullAttentionSpec(**shape)
        return SlidingWindowSpec(**shape, sliding_window=window_tokens)

    def determine_available_memory(self) -> list[int]:
        blocks = self.node.capacity.gpu_blocks
        return [blocks * layout.block_bytes for layout in self.node.layouts for _ in range(self._tensor)]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [[KVCacheLayout.BLHNC.name]] * self.parallel_config.world_size

    def set_kv_cache_layout(self, layout_name: str, cp_kv_cache_interleave_size: int = 1) -> None:
        assert layout_name == KVCacheLayout.BLHNC.name, layout_name

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        specs = [group.kv_cache_spec for group in kv_cache_configs[0].kv_cache_groups]
        self._sequences.windows = [
            spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None for spec in specs
        ]
        if self.vllm_config.kv_transfer_config is None:
            return
        stages = zip(kv_cache_configs[:: self._tensor], self.node.devices, self.node.layouts, strict=True)
        self._connectors = [
            self.connector_class(self.vllm_config, config, stage=stage, device=device, layout=layout)
            for stage, (config, device, layout) in enumerate(stages)
        ]

    def compile_or_warm_up_model(self) -> None:
        pass

    def get_kv_connector_handshake_metadata(self) -> list[Any]:
        return []

    @property
    def supported_tasks(self) -> tuple[str, ...]:  # type: ignore[override]  # a cached property there
        return ("generate",)

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"a virtual node has no workers to call {method} on")

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        for connector in self._connectors:
            connector.shutdown()

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    # -- a step ---------------------------------------------------------------------------------------------------

    def execute_model(  # type: ignore[override]  # overloaded there
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> Future[Any]:
        assert non_block, "vLLM's core does not wait here"
        now_s = self.clock.now_s()
        with self.clock.paused():
            self.node.catch_up(now_s)
            run = self._sequences.run(self._take_in(scheduler_output))
            step = self._submit(scheduler_output, run)
            output = ModelRunnerOutput(
                req_ids=[*run.sampled],
                req_id_to_index={request_id: index for index, request_id in enumerate(run.sampled)},
                sampled_token_ids=[*run.sampled.values()],
                kv_connector_output=self._connector_output(),
            )
            if step is None:
                return self._future(output)
            self._last_done = step.done
            self._sampled = output
            computed: Future[None] = Future()
            computed.set_result(None)
            return computed

    def sample_tokens(  # type: ignore[override]  # overloaded there
        self, grammar_output: GrammarOutput | None, non_block: bool = False
    ) -> Future[ModelRunnerOutput]:
        assert non_block, "vLLM's core does not wait here"
        assert self._sampled is not None, "no step was computed"
        output, self._sampled = self._sampled, None
        return self._future(output)

    def _future(self, output: ModelRunnerOutput) -> StepFuture:
        """Return the output of the step submitted last; an empty step's comes behind those of the steps before it."""
        done = self._last_done
        return StepFuture(output, lambda: self._wait_for(done))

    def _wait_for(self, done: VirtualEvent | None) -> None:
        if done is not None:
            with self.clock.paused():
                done_s = self.node.run_to(done)
            self.clock.wait_until(done_s)
        self._host_works_since_s = self.clock.now_s()

    def _take_in(self, output: SchedulerOutput) -> list[ScheduledTokens]:
        """Bring the requests up to date, and return what the step computes."""
        sequences = self._sequences
        sequences.forget(output.finished_req_ids)
        sequences.forget(output.preempted_req_ids or ())
        first: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            assert new.prompt_token_ids is not None, f"{new.req_id} has no token ids"
            assert new.prefill_token_ids is not None, "made for the V2 runner"
            assert new.sampling_params is not None, f"{new.req_id} does not generate"
            sequences.start(
                new.req_id,
                new.prefill_token_ids,
                num_prompt=len(new.prompt_token_ids),
                num_outputs=(new.sampling_params.extra_args or {})[OUTPUT_TOKENS],
                blocks=new.block_ids,
            )
            first[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id in cached.resumed_req_ids:
                assert blocks is not None, f"{request_id} is resumed without its blocks"
                sequences.replace_blocks(request_id, blocks)
            elif blocks is not None:
                sequences.append_blocks(request_id, blocks)
            first[request_id] = computed
        return [
            ScheduledTokens(request_id=request_id, first=first[request_id], num=num)
            for request_id, num in output.num_scheduled_tokens.items()
        ]

    def _submit(self, output: SchedulerOutput, run: RunStep) -> NodeStep | None:
        """Put a step on all stages' lanes, in the order of a GPU's worker; return None if it computes nothing."""
        step = self._begin_step(run)
        for stage, device in enumerate(self.node.devices):
            device.begin_step()
            if not self._connectors:
                if step is not None:
                    self.node.receive(step, stage)
                    self.node.compute(step, stage)
                continue
            self._submit_with_copies(output, step, stage)
        return step

    def _begin_step(self, run: RunStep) -> NodeStep | None:
        """Begin the node's step; return None if it computes nothing, which counts among the steps all the same."""
        if run.sampled:
            return self.node.begin_step(run.work, run.kv, host_works_since_s=self._host_works_since_s)
        self.node.pass_empty_step()
        return None

    def _submit_with_copies(self, output: SchedulerOutput, step: NodeStep | None, stage: int) -> None:
        connector, metadata = self._connectors[stage], output.kv_connector_metadata
        assert isinstance(metadata, StepMetadata), metadata
        clock = connector.gpu_clock
        assert clock is not None
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        if step is not None:
            self.node.receive(step, stage)
            if stage > 0:
                clock.mark_received()
            self.node.compute(step, stage)
        connector.finish_forward()
        if step is not None:
            clock.mark_computed()
            if stage + 1 == self.node.num_stages:
                clock.mark_sampled()

    def _connector_output(self) -> KVConnectorOutput | None:
        if not self._connectors:
            return None
        merged = WorkerReports({})
        for connector in self._connectors:
            reports = connector.build_connector_worker_meta()
            connector.clear_connector_metadata()
            if reports is not None:
                merged.aggregate(reports)
        return KVConnectorOutput(kv_connector_worker_meta=merged if merged.by_stage else None)
