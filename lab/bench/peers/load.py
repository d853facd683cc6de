"""The load that every system gets: one table, one model, one set of engine arguments. It knows no system."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

REPOSITORY = Path(__file__).resolve().parents[3]
LOGS = REPOSITORY / "logs" / "peers"
"""The output of each system's processes, kept until the system is measured again."""
WARM_UP_ROWS = 32
LENGTHS = ("skewed", "uniform", "short", "long")
_WORDS = (
    "the",
    "a",
    "package",
    "library",
    "of",
    "for",
    "tool",
    "that",
    "data",
    "files",
    "small",
    "fast",
    "text",
    "old",
)


@dataclass(frozen=True, kw_only=True)
class Load:
    """Where the inputs of a comparison are, and how to run them."""

    directory: str
    """Holds ``model/`` and ``prompts.parquet``: (id int64, prompt string, max_tokens int32)."""
    rows: int
    lengths: str
    repeats: int
    cores: tuple[int, ...]
    """The cores that every system may use, in total."""
    batch_rows: int = 64
    """Rows that a system hands over at a time, if it has such a setting; also the engine's ``max_num_seqs``."""

    @property
    def model(self) -> str:
        return str(Path(self.directory) / "model")

    @property
    def table(self) -> str:
        return str(Path(self.directory) / "prompts.parquet")

    def prompts(self, limit: int | None = None) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = pq.read_table(self.table).slice(0, limit).to_pylist()
        return rows

    def vllm_arguments(self) -> dict[str, Any]:
        """Return the arguments of vLLM's ``LLM``; ``pipemax_engine`` returns the same in PipeMax's terms."""
        return {
            "model": self.model,
            "dtype": "float32",
            "max_model_len": 512,
            "max_num_seqs": self.batch_rows,
            "max_num_batched_tokens": 2048,
            "kv_cache_memory_bytes": 1 << 28,
            "enable_prefix_caching": False,  # otherwise a repeat would find what the one before it left
            "enforce_eager": True,
        }

    def pipemax_engine(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "policy": "vllm",  # the same engine in all systems: the comparison is of how it is fed
            "pipeline_parallel_size": 1,
            "dtype": "float32",
            "max_model_len": 512,
            "max_num_seqs": self.batch_rows,
            "max_num_batched_tokens": 2048,
            "cpu_kv_gib": 0.25,
            "enable_prefix_caching": False,
            "chat": "never",
        }

    def check_answers(self, tokens_by_id: dict[int, int]) -> int:
        """Return the total output tokens; raise ``ValueError`` unless each row has exactly the tokens it asks for."""
        asked = {row["id"]: row["max_tokens"] for row in self.prompts()}
        wrong = [i for i in asked.keys() | tokens_by_id.keys() if asked.get(i) != tokens_by_id.get(i)]
        if wrong:
            some = ", ".join(f"{i}: {tokens_by_id.get(i)} for {asked.get(i)}" for i in sorted(wrong)[:5])
            raise ValueError(
                f"{len(wrong)} of {len(asked)} rows have other output tokens than asked for ({some})"
            )
        return sum(asked.values())

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        values = json.loads(text)
        return cls(**{**values, "cores": tuple(values["cores"])})


def write_model(load: Load) -> None:
    """Write the demo model without a token that ends an answer, so that each answer is as long as its row asks for.

    Not every system can tell the engine to ignore that token. The chat template is the message itself: some systems
    take only chats, and get the same prompts as the others.
    """
    model = Path(load.model)
    shutil.copytree(REPOSITORY / "examples" / "model", model, dirs_exist_ok=True)
    _set(model / "config.json", eos_token_id=None)
    _set(model / "generation_config.json", eos_token_id=None)
    _set(model / "tokenizer_config.json", eos_token=None)
    (model / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )


def _set(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def write_table(load: Load) -> None:
    """Write prompts of 20 to 60 words, the same every time; ``lengths`` decides how many tokens they ask for."""
    rng = Random(0)
    rows = [
        {
            "id": number,
            "prompt": " ".join(rng.choice(_WORDS) for _ in range(rng.randint(20, 60))),
            "max_tokens": _output_tokens(rng, load.lengths),
        }
        for number in range(load.rows)
    ]
    schema = pa.schema([("id", pa.int64()), ("prompt", pa.string()), ("max_tokens", pa.int32())])
    pq.write_table(pa.Table.from_pylist(rows, schema), load.table)


def _output_tokens(rng: Random, lengths: str) -> int:
    match lengths:
        case "uniform":
            return 28
        case "skewed":  # about the same mean: most answers are short, some are long
            return rng.choices((4, 32, 200), weights=(70, 20, 10))[0]
        case "short":  # a label or a word
            return 7
        case "long":  # 200 on average; ShareGPT's answers in the PipeMax paper (tab:dataset-stats) have 237
            return rng.choices((28, 224, 400), weights=(30, 50, 20))[0]
        case _:
            raise ValueError(f"lengths is {lengths!r}, must be one of {', '.join(LENGTHS)}")
