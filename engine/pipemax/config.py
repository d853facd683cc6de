"""EngineConfig: one YAML file that describes an engine. Every field except the model has a default.

A default of ``None`` is resolved where the fact is known: by the model's own configuration (dtype, length), or by the
GPUs of the machine (pipeline degree). This module knows nothing of vLLM.
"""

import difflib
import hashlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from pipemax.domain.choices import BatchingChoice as BatchingChoice
from pipemax.domain.choices import ChatMode as ChatMode
from pipemax.domain.choices import Policy as Policy
from pipemax.domain.choices import Waves as Waves
from pipemax.domain.specs import KvCacheDtype
from pipemax.removed import removed_key
from pipemax.vllm_names import CHANGE_ANSWERS, MOVED_TO_SPEED

_ASSUMED_OUTPUT_SHARE = 1 / 4


class RowLengths(BaseModel):
    """Lengths of the rows to come, from a sample of the table; ``policy: auto`` decides by them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt_tokens: tuple[int, ...] = Field(
        min_length=1, description="Prompt lengths of sampled rows, including a shared prefix."
    )
    shared_prefix_tokens: int = Field(0, ge=0, description="Leading tokens that all prompts have in common.")
    max_tokens: int = Field(ge=1, description="Maximum output tokens per row.")
    mean_output_tokens: float | None = Field(
        None,
        gt=0.0,
        description="Expected output tokens per row; default: a quarter of max_tokens.",
    )
    rows: int | None = Field(
        None, ge=1, description="Rows of the table; with several executors, of each one's share."
    )

    @property
    def expected_output_tokens(self) -> float:
        """``mean_output_tokens``, or a share of ``max_tokens``, which users set so that few answers are cut."""
        return self.mean_output_tokens or max(1.0, _ASSUMED_OUTPUT_SHARE * self.max_tokens)

    @property
    def tokens_per_row(self) -> float:
        """The mean of prompt and expected output together."""
        return sum(self.prompt_tokens) / len(self.prompt_tokens) + self.expected_output_tokens


class ImageConfig(BaseModel):
    """Limits of the images in rows, which need stock vLLM: a row beyond them is an error row (docs/guide/images.md)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_bytes: int = Field(20 * 2**20, ge=1, description="Maximum bytes of an image as its file has it.")
    max_pixels: int = Field(
        89_478_485,
        ge=1,
        le=2 * 89_478_485,
        description="Maximum width times height, which is read before the image is decoded.",
    )
    max_per_row: int = Field(8, ge=1, description="Maximum images of one row.")
    directories: tuple[str, ...] = Field(
        ("/",), description="Directories from which files are read, links resolved; default: any."
    )
    allow_urls: tuple[str, ...] = Field(
        (), description="Hosts from which http(s) URLs may be fetched; * allows any. Default: none."
    )
    fetch_timeout_s: float = Field(
        10.0,
        gt=0.0,
        allow_inf_nan=False,
        description="Seconds for an http(s) URL's answer; it is tried three times.",
    )


class EngineConfig(BaseModel):
    """The engine to run. Two servers with equal ``engine_id`` are interchangeable."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(description="Directory of a Hugging Face checkpoint, or a hub name such as org/name.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub model.")
    tokenizer: str | None = Field(None, description="Directory or hub name; default: the model's own.")
    policy: Policy = Field(
        Policy.AUTO,
        description="Scheduler: vllm is stock vLLM; pipemax keeps KV in host memory too; auto measures the engine "
        "once, simulates both on a sample of the rows, and takes the faster.",
    )
    task: Literal["generate", "embed", "classify", "score"] = Field(
        "generate",
        description="generate, or with a pooling model embed, classify or score; a job sets it (--task).",
    )
    dtype: str = Field(
        "auto",
        description="Type of weights and activations: auto (the checkpoint's), bfloat16, float16, float32.",
    )
    kv_cache_dtype: KvCacheDtype = Field(
        KvCacheDtype.AUTO,
        description="Type of the KV cache: auto (the checkpoint's, otherwise dtype), fp8, fp8_e4m3 or fp8_e5m2. FP8 "
        "takes half the bytes of 16-bit KV, in the pools and in copies, and changes answers.",
    )
    lora: dict[str, str] = Field(
        default_factory=dict,
        description="LoRA adapters that rows may name: directories by name. All are kept on the GPUs.",
    )
    quantization: str | None = Field(None, description="vLLM quantization method; default: the checkpoint's.")
    pipeline_parallel_size: int | None = Field(
        None,
        ge=1,
        description="Pipeline stages; default: by simulations of all layouts, 1 without GPUs. "
        "On a machine without GPUs they are processes that share its cores.",
    )
    tensor_parallel_size: int | None = Field(
        None,
        ge=1,
        description="GPUs that share each stage, without GPUs processes; default: by simulations of all layouts, 1 "
        "without GPUs.",
    )
    replicas: int | None = Field(
        None,
        ge=1,
        description="Engines side by side in the executor, which share its GPUs, cores and memory for KV equally and "
        "get rows from one queue; default: by simulations of all layouts, 1 without GPUs.",
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="Maximum length of prompt plus output in tokens; default: the model's own limit.",
    )
    max_num_seqs: int | None = Field(
        None,
        ge=1,
        description="Maximum requests in one step; default: vLLM's for offline batches on the device, and on GPUs "
        "under stock vLLM room for as many sampled rows as the KV cache holds.",
    )
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        description="Maximum tokens in one step; default: vLLM's for offline batches on the device, and on GPUs under "
        "stock vLLM room for twice that where the sampled prompts outweigh the outputs.",
    )
    block_size: int | None = Field(
        None, ge=1, description="Tokens in one KV block; default: vLLM's for the device."
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0.0, le=1.0, description="Share of each GPU's memory for weights and KV cache."
    )
    cpu_kv_gib: float = Field(
        1.0, gt=0.0, description="KV cache of each process in GiB on a machine without GPUs."
    )
    host_kv_gib: float | None = Field(
        None,
        gt=0.0,
        description="policy pipemax: host memory for each stage's KV in GiB (for each GPU's, if several share a "
        "stage); default: 4 times cpu_kv_gib, and on GPUs their share of half of the available memory.",
    )
    batching: BatchingChoice = Field(
        BatchingChoice.AUTO,
        description="policy pipemax and auto: separated (phases of prefill and of decode, as in the paper), mixed "
        "(each step decodes a batch and takes prompt tokens, up to mixed_step_tokens in all), or auto (mixed, or "
        "whichever simulations find faster for a short table; separated while nothing is measured).",
    )
    mixed_step_tokens: int | None = Field(
        None,
        ge=1,
        description="policy pipemax and auto: maximum tokens of a mixed step; default: up to 2,048, where a token "
        "costs least by the calibration, or max_num_batched_tokens while nothing is measured.",
    )
    num_batches: int | None = Field(
        None,
        ge=1,
        description="policy pipemax: decode batches in rotation; default: one for each pipeline stage, and two for "
        "one.",
    )
    waves: Waves = Field(
        Waves.AUTO,
        description="policy pipemax: on has prefetched KV overwrite the KV of the batch that computes, behind the "
        "computation and layer by layer, which leaves room for larger batches. auto is off.",
    )
    calibration: Path | None = Field(
        None,
        description="policy pipemax and auto: a file written by pipemax check-node --out; default: what this machine "
        "measured earlier.",
    )
    calibrate_at_start_s: float = Field(
        15.0,
        ge=0.0,
        description="policy pipemax and auto: seconds for measuring step times at an engine's first start, if "
        "nothing is known about it, and up to three times as long while they vary; 0 starts with a guess and learns "
        "while running.",
    )
    check_at_start: bool = Field(
        True,
        description="policy pipemax and auto: at an engine's first start on a machine, check its copies byte for "
        "byte, and that poison under its prefetches changes no token; do not run PipeMax there if it does.",
    )
    tune: bool = Field(
        True,
        description="Stock vLLM: find the size of steps and the number of running rows that are the fastest on the "
        "table's own rows, while it is answered; max_num_seqs and max_num_batched_tokens are the ceilings.",
    )
    row_lengths: RowLengths | None = Field(
        None, description="policy auto: lengths of the rows; default: a sample that the job draws."
    )
    enable_prefix_caching: bool = Field(True, description="Keep the KV of shared prompt prefixes.")
    enforce_eager: bool | None = Field(
        None,
        description="Run without compiling or CUDA graphs: starts sooner, runs slower; default: on a CPU only.",
    )
    chat: ChatMode = Field(ChatMode.AUTO, description="Wrap plain prompts in the model's chat template.")
    reasoning_parser: str | None = Field(
        None,
        description="vLLM's reasoning parser for the model (qwen3, deepseek_r1, openai_gptoss, …): its thinking is "
        "then split off from the answer, and a schema or choice binds only the answer.",
    )
    json_whitespace: Literal["compact", "any"] = Field(
        "compact",
        description="White space between the tokens of JSON that follows a schema: compact forbids it, in which small "
        "models can loop; any leaves it to vLLM's backend auto. vllm: {structured_outputs_config: …} goes before it.",
    )
    json_backend: Literal["xgrammar", "guidance"] = Field(
        "xgrammar",
        description="vLLM's backend for compact JSON; a job whose schema it cannot enforce takes the other one.",
    )
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port at which an engine server serves its figures to Prometheus; 0, or where it is taken, a free "
        "one; default: none.",
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the checkpoint.")
    seed: int = Field(0, ge=0, description="Seed of the engine itself; rows have their own seeds.")
    images: ImageConfig = Field(
        default_factory=lambda: ImageConfig.model_validate({}),
        description="Limits of images: bytes, pixels, number, directories, hosts of URLs.",
    )
    vllm: dict[str, Any] = Field(
        default_factory=dict,
        description="Further arguments of vLLM's EngineArgs, by their Python names. They are part of a job's spec.",
    )
    vllm_speed: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of vLLM's EngineArgs that change speed, memory or logging and no answer; they are not "
        "part of a job's spec.",
    )

    @model_validator(mode="before")
    @classmethod
    def _speed_has_its_place(cls, values: Any) -> Any:
        moved = moved_to_speed(values)
        if not moved:
            return values
        vllm, speed = values["vllm"], values.get("vllm_speed") or {}
        if both := moved & speed.keys():
            raise ValueError(
                f"{sorted(both)[0]} stands under vllm and under vllm_speed; leave it out of vllm"
            )
        return values | {
            "vllm": {name: value for name, value in vllm.items() if name not in moved},
            "vllm_speed": speed | {name: vllm[name] for name in sorted(moved)},
        }

    @field_validator("vllm_speed")
    @classmethod
    def _speed_changes_no_answer(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        if wrong := sorted(CHANGE_ANSWERS & arguments.keys()):
            raise ValueError(
                f"{wrong[0]} may change answers, which must be known to the job's spec: put it under vllm"
            )
        return arguments

    @field_validator("model")
    @classmethod
    def _model_is_named(cls, model: str) -> str:
        if not model.strip():
            raise ValueError("is empty; give a checkpoint directory or a hub name")
        return model

    @field_validator("task", "reasoning_parser")
    @classmethod
    def _pooling_generates_nothing(cls, value: Any, info: ValidationInfo) -> Any:
        task = value if info.field_name == "task" else info.data.get("task", "generate")
        if task == "generate" or value is None:
            return value
        if info.field_name != "task":
            raise ValueError(f"is only for generation, and the task is {task}; leave {info.field_name} out")
        if info.data.get("policy") is Policy.PIPEMAX:
            reason = "generates no tokens, so policy pipemax has nothing to schedule"
            raise ValueError(f"{task} {reason}; set policy: vllm, or auto, which takes stock vLLM for it")
        return value

    @field_validator("lora")
    @classmethod
    def _adapters_are_named(cls, lora: dict[str, str]) -> dict[str, str]:
        for name, directory in lora.items():
            if not name.strip() or not directory.strip():
                raise ValueError(f"adapter {name!r} needs a name and a directory, not {directory!r}")
        return lora

    @field_validator("vllm")
    @classmethod
    def _token_is_not_written_down(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        if arguments.get("hf_token"):
            raise ValueError(
                "hf_token would appear in logs and in MLflow; leave it out and set the variable HF_TOKEN for the "
                "executors, from your cluster's store of secrets"
            )
        return arguments

    @field_validator("waves", mode="before")
    @classmethod
    def _yaml_reads_on_as_true(cls, waves: Any) -> Any:
        return {True: Waves.ON, False: Waves.OFF}[waves] if isinstance(waves, bool) else waves

    @field_validator("vllm", "vllm_speed")
    @classmethod
    def _pipemax_has_the_connector(cls, arguments: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if info.data.get("policy") is Policy.PIPEMAX:
            require_free_connector(arguments)
        return arguments

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """Validate parsed YAML or JSON. Raise ``ValueError`` with one readable line per fault, naming the field."""
        if "endpoint" in values:
            raise ValueError(
                "it names an endpoint, whose server decides how its model runs, and this is for engines of one's own "
                "machines; pipemax doctor --engine FILE tries an endpoint"
            )
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ValueError(readable(error, known=cls)) from None

    @classmethod
    def load(cls, path: Path, *, default_model: str | None = None, **overrides: object) -> Self:
        """Read a YAML file.

        ``overrides`` take precedence over it, and ``default_model`` is for a file that names no model.

        Raise ``ValueError`` that names the file.
        """
        values = read_config(path)
        try:
            if line := moved_line(values):
                warnings.warn(line, stacklevel=2)
            named = {} if default_model is None else {"model": default_model}
            return cls.parse({**named, **values, **overrides})
        except ValueError as error:
            raise ValueError(f"engine config {path}: {error}") from None

    @property
    def vllm_arguments(self) -> dict[str, Any]:
        """The arguments of vLLM under ``vllm`` and under ``vllm_speed``."""
        return self.vllm | self.vllm_speed

    def vllm_argument(self, name: str) -> Any:
        """Return the value that vLLM gets for a field that is also an argument of vLLM; ``vllm`` takes precedence."""
        return self.vllm_arguments.get(name, getattr(self, name))

    @property
    def num_replicas(self) -> int:
        """The number of engines that this config asks for."""
        return self.replicas or 1

    @property
    def tensor_degree(self) -> int:
        """The GPUs that share each stage: as configured, otherwise 1."""
        return self.tensor_parallel_size or 1

    @property
    def frees_windows(self) -> bool | None:
        """Whether PipeMax frees the KV that has left sliding windows; None if that depends on how many rows then fit.

        It shares no prefixes where it does.
        """
        keeps = self.vllm_arguments.get("disable_hybrid_kv_cache_manager")
        if keeps is not None:
            return not keeps
        return None if not self.enable_prefix_caching and self.row_lengths is not None else False

    @property
    def is_pooling(self) -> bool:
        """Whether the task generates nothing."""
        return self.task != "generate"

    def engine_id(self) -> str:
        """Return a digest: equal configs have equal ids, whatever rows were sampled for them.

        A job that finds another job's engine takes it with the policy chosen for that job, and need not load it again.
        """
        text = json.dumps(
            self.model_dump(mode="json", exclude={"row_lengths", "metrics_port"}), sort_keys=True
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def moved_to_speed(values: Any) -> set[str]:
    """Return the names under ``vllm`` of an engine config that belong under ``vllm_speed`` and are moved there."""
    vllm = values.get("vllm") if isinstance(values, dict) else None
    return set(MOVED_TO_SPEED & vllm.keys()) if isinstance(vllm, dict) else set()


def moved_line(values: Any) -> str | None:
    """Return the line that warns of the names that ``moved_to_speed`` finds; None without any."""
    moved = sorted(moved_to_speed(values))
    if not moved:
        return None
    return (
        f"engine config: {', '.join(moved)} under vllm change no answer and are taken as if they stood under "
        "vllm_speed; move them there, the next release counts them in the spec"
    )


def require_free_connector(arguments: dict[str, Any]) -> None:
    """Raise ``ValueError`` if these arguments of vLLM name a KV connector: PipeMax uses its own in its place."""
    for name in ("kv_transfer_config", "kv_offloading_size"):
        if arguments.get(name) is not None:
            raise ValueError(
                f"policy pipemax keeps KV in host memory with its own KV connector, and {name} names another: leave "
                "it out, or set policy: vllm"
            )


def _unknown(key: str, name: str, place: tuple[int | str, ...], kind: type[BaseModel]) -> str:
    """Say that there is no such key at a place of the config, and which there are."""
    for part in place:
        if isinstance(part, int):  # of a list, whose type is that of its entries
            continue
        inner = kind.model_fields[str(part)].annotation
        kinds = [inner, *get_args(inner)]
        kind = next(member for member in kinds if isinstance(member, type) and issubclass(member, BaseModel))
    known = sorted(kind.model_fields)
    close = difflib.get_close_matches(key.replace("-", "_").lower(), known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"unknown field {name!r}.{hint} Known fields: {', '.join(known)}"


def _shows(name: str) -> bool:
    return not name.startswith("vllm")  # its values may contain a secret


def read_config(path: Path) -> dict[str, Any]:
    """Return the values of an engine config's YAML file. Raise ``ValueError`` that names the file."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"engine config {path}: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"engine config {path}: expected 'name: value' lines, got a {type(values).__name__}")
    return values


def readable(error: ValidationError, *, known: type[BaseModel], shows: Callable[[str], bool] = _shows) -> str:
    """Return one readable line for what is wrong with a config; ``shows`` tells which fields' values it may name."""
    faults = []
    for fault in error.errors():
        name = ".".join(str(part) for part in fault["loc"])
        match fault["type"]:
            case "extra_forbidden":
                faults.append(
                    removed_key(name) or _unknown(str(fault["loc"][-1]), name, fault["loc"][:-1], known)
                )
            case "missing":
                faults.append(f"field {name!r} is missing")
            case _ if not shows(name):
                faults.append(f"{name}: {fault['msg']}")
            case _:
                faults.append(f"{name}: {fault['msg']} (got {fault['input']!r})")
    return "; ".join(faults)
