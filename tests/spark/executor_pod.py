"""``python -m tests.spark.executor_pod``: Spark's settings in, the pod that it would ask Kubernetes for out, as JSON.

Spark's own builder makes it, no cluster is asked. A process of its own, since a JVM has one default resource profile.
"""

import json
import sys
from typing import Any

from pyspark.java_gateway import launch_gateway

_OF_AN_APPLICATION = {
    "spark.app.name": "test",
    "spark.driver.host": "driver.example.com",
    "spark.driver.port": "7078",
    "spark.kubernetes.resource.type": "python",  # as spark-submit sets it
}


def executor_pod(jvm: Any, settings: dict[str, str]) -> str:
    conf = jvm.org.apache.spark.SparkConf(False)
    for name, value in {**_OF_AN_APPLICATION, **settings}.items():
        conf.set(name, value)
    profile = _companion(jvm.org.apache.spark.resource, "ResourceProfile").getOrCreateDefaultProfile(conf)
    none = jvm.scala.Option.empty()
    kubernetes = _companion(jvm.org.apache.spark.deploy.k8s, "KubernetesConf")
    of_executor = kubernetes.createExecutorConf(conf, "1", "application", none, 0)
    names = _companion(jvm.org.apache.spark.internal.config, "package")
    security = jvm.org.apache.spark.SecurityManager(conf, none, names.AUTH_SECRET_FILE())
    client = jvm.io.fabric8.kubernetes.client.KubernetesClientBuilder().build()
    builder = jvm.org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBuilder()
    built = builder.buildFromFeatures(of_executor, security, client, profile).pod()
    pod = jvm.io.fabric8.kubernetes.api.model.PodBuilder(built.pod())
    whole = pod.editOrNewSpec().addAllToContainers([built.container()]).endSpec().build()
    return str(jvm.io.fabric8.kubernetes.client.utils.Serialization.asJson(whole))


def _companion(package: Any, name: str) -> Any:
    """Scala's object of this name."""
    return getattr(getattr(package, f"{name}$"), "MODULE$")


if __name__ == "__main__":
    print(executor_pod(launch_gateway().jvm, json.load(sys.stdin)))  # type: ignore[no-untyped-call]
