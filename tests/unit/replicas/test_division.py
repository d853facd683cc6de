"""GPUs, cores and memory are divided equally, and near each other."""

import re

import pytest

from pipemax.config import EngineConfig, RowLengths
from pipemax.replicas.division import divide
from pipemax.replicas.hardware import Gpu, Hardware


def config(replicas: int, **fields: object) -> EngineConfig:
    return EngineConfig.parse({"model": "any", "replicas": replicas, **fields})


def two_sockets(num_gpus: int) -> Hardware:
    """Half of the GPUs on each; the driver lists them in another order."""
    gpus = [
        Gpu(uuid=f"GPU-{i}", numa_node=int(i >= num_gpus // 2), pci_address=f"{i:02}")
        for i in range(num_gpus)
    ]
    return Hardware(gpus=tuple(reversed(gpus)), cores_of_nodes={0: (0, 1, 2, 3), 1: (4, 5, 6, 7)})


def test_gpus_of_a_socket_stay_together_and_get_its_cores() -> None:
    shares = divide(config(4, host_kv_gib=1), two_sockets(8))
    assert [share.gpus for share in shares] == [
        ("GPU-0", "GPU-1"),
        ("GPU-2", "GPU-3"),
        ("GPU-4", "GPU-5"),
        ("GPU-6", "GPU-7"),
    ]
    assert [share.cores for share in shares] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert all(share.config.replicas is None for share in shares)
    assert len({share.config.engine_id() for share in shares}) == 1


def test_replicas_whose_gpus_lie_on_two_sockets_get_equal_parts_of_all_cores() -> None:
    hardware = Hardware(
        gpus=tuple(Gpu(uuid=f"GPU-{i}", numa_node=i % 2) for i in range(6)),
        cores_of_nodes={0: (0, 1, 2), 1: (3, 4, 5)},
    )
    shares = divide(config(2, host_kv_gib=1), hardware)
    assert [share.gpus for share in shares] == [("GPU-0", "GPU-2", "GPU-4"), ("GPU-1", "GPU-3", "GPU-5")]
    three = divide(config(3, host_kv_gib=1), hardware)
    assert [share.cores for share in three] == [(0, 1), (2, 3), (4, 5)]


def test_without_gpus_cores_are_divided_and_every_replica_gets_as_many() -> None:
    shares = divide(config(2), Hardware(cores_of_nodes={0: (0, 1, 2, 3, 4)}))
    assert [share.cores for share in shares] == [(0, 1), (2, 3)]
    crowded = divide(config(3), Hardware(cores_of_nodes={0: (0, 1)}))
    assert [share.cores for share in crowded] == [(0,), (1,), (0,)]


def test_on_a_cpu_all_replicas_together_take_the_memory_of_one_engine() -> None:
    own = divide(config(4, cpu_kv_gib=8, host_kv_gib=20), Hardware(cores_of_nodes={0: (0,)}))[0].config
    assert (own.cpu_kv_gib, own.host_kv_gib) == (2.0, 5.0)
    by_default = divide(config(4, cpu_kv_gib=8), Hardware(cores_of_nodes={0: (0,)}))[0].config
    assert by_default.host_kv_gib is None, "4 times cpu_kv_gib, as for one engine"


def test_on_gpus_the_pools_of_all_replicas_share_what_one_engine_would_take() -> None:
    one = divide(config(1), two_sockets(8))[0].config
    assert one.host_kv_gib is None
    two, four = (divide(config(count), two_sockets(8))[0].config.host_kv_gib for count in (2, 4))
    assert two is not None
    assert four == pytest.approx(two, rel=0.05), "of one GPU, and there are 8 either way"
    assert divide(config(4, host_kv_gib=3), two_sockets(8))[0].config.host_kv_gib == 3.0


def test_the_rows_of_a_table_are_divided_too() -> None:
    lengths = RowLengths(prompt_tokens=(5,), max_tokens=3, rows=101)
    own = divide(config(2, row_lengths=lengths), Hardware(cores_of_nodes={0: (0,)}))[0].config
    assert own.row_lengths is not None
    assert own.row_lengths.rows == 51


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"replicas": 9}, "replicas 9 need a GPU each, and this executor has 8"),
        (
            {"replicas": 4, "tensor_parallel_size": 4},
            "each of 4 replicas gets 2 of 8 GPUs: pipeline_parallel_size 1 × tensor_parallel_size 4 needs 4",
        ),
    ],
)
def test_too_few_gpus_are_told(fields: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        divide(EngineConfig.parse({"model": "any", **fields}), two_sockets(8))
