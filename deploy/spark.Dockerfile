# Spark on Kubernetes: the engine's image with Spark 4.2, Delta's jars and the wheel. conf/spark/kubernetes.conf names it.
#   docker build --file deploy/spark.Dockerfile --tag registry.example.com/pipemax-spark:0.1.0 .

ARG SPARK_IMAGE=apache/spark:4.2.0-scala2.13-java17-ubuntu
ARG ENGINE_IMAGE=pipemax-engine:0.1.0
FROM ${SPARK_IMAGE} AS spark

# Not the other way round: apache/spark's images have Ubuntu 22.04, whose Python 3.10 is too old.
FROM ${ENGINE_IMAGE}
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
USER 0

# Java, and what Spark's entrypoint calls. Versions are the base's: a rebuild takes its security updates.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gosu libnss-wrapper openjdk-17-jre-headless procps tini \
    && apt-get clean && rm -rf /var/lib/apt/lists/*

COPY --from=spark /opt/spark /opt/spark
COPY --from=spark /opt/entrypoint.sh /opt/decom.sh /opt/
RUN mkdir -p /opt/spark/work-dir && chown spark:spark /opt/spark/work-dir

# Spark's own Python and jars are used: pyspark is left out of the lock, and of Delta's jars what Spark has already.
RUN --mount=type=bind,source=requirements/spark.lock,target=/tmp/spark.lock \
    python3 -m venv /opt/pipemax/spark \
    && grep -vE '^(delta-spark|pyspark)==' /tmp/spark.lock > /tmp/without-pyspark.lock \
    && /opt/pipemax/spark/bin/pip install --no-cache-dir --no-deps --requirement /tmp/without-pyspark.lock \
    && rm /tmp/without-pyspark.lock

ARG DELTA_PACKAGE=io.delta:delta-spark_4.2_2.13:4.4.0
RUN touch /tmp/nothing.py \
    && SPARK_LOCAL_IP=127.0.0.1 PYSPARK_PYTHON=/opt/pipemax/spark/bin/python /opt/spark/bin/spark-submit \
        --packages "${DELTA_PACKAGE}" --conf spark.jars.ivy=/tmp/ivy /tmp/nothing.py \
    && for jar in /tmp/ivy/jars/*.jar; do \
        name=${jar#*_}; \
        ls /opt/spark/jars/"${name%%-[0-9]*}"-[0-9]*.jar >/dev/null 2>&1 || cp "${jar}" "/opt/spark/jars/${name}"; \
    done \
    && rm -r /tmp/ivy /tmp/nothing.py

RUN --mount=type=bind,source=dist,target=/tmp/dist \
    /opt/pipemax/spark/bin/pip install --no-cache-dir --no-deps /tmp/dist/pipemax_spark-*.whl
COPY jobs/annotate.py /opt/pipemax/jobs/

ENV SPARK_HOME=/opt/spark \
    PYSPARK_PYTHON=/opt/pipemax/spark/bin/python \
    PATH=/opt/pipemax/spark/bin:/opt/spark/bin:${PATH}
WORKDIR /opt/spark/work-dir
USER 185:185
ENTRYPOINT ["/opt/entrypoint.sh"]
