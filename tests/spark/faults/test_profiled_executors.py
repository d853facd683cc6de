"""GPUs that a discovery script finds: which engine gets which, and what is said where they are too few."""

from tests.spark.faults.cluster import Cluster, assert_as_undisturbed


def test_more_stages_than_the_executor_has_gpus_are_refused_before_any_engine_starts(
    cluster: Cluster,
) -> None:
    answer = cluster.answer(cluster.submit("job", engine=cluster.engine | {"pipeline_parallel_size": 4}))
    assert answer.error is not None
    assert "pipeline_parallel_size 4 × tensor_parallel_size 1 needs 4 GPUs" in answer.error
    assert "this executor has 2 (CUDA_VISIBLE_DEVICES=" in answer.error


def test_executors_of_a_profile_of_their_own_take_the_gpus_that_are_left(cluster: Cluster) -> None:
    assert_as_undisturbed(cluster.answer(cluster.submit("profile")))
    visible = [cluster.visible_gpus(server) for server in cluster.servers()]
    assert len(visible) > 2
    assert len(set(visible)) == len(visible), f"two engines share GPUs: {visible}"
