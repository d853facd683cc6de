# The engine's environment, requirements/gpu.lock and the wheel, over CUDA 13. docs/deploy/kubernetes.md says what was tried.
#   make wheel
#   docker build --file deploy/engine.Dockerfile --tag pipemax-engine:0.1.0 .
#   docker run --gpus all --ipc host pipemax-engine:0.1.0 pipemax doctor

# "devel" has nvcc: FlashInfer compiles kernels when they are first used.
ARG CUDA_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04
FROM ${CUDA_IMAGE}
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

# Triton compiles with gcc and Python's headers. Versions are the base's: a rebuild takes its security updates.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates g++ python3-dev python3-venv \
    && apt-get clean && rm -rf /var/lib/apt/lists/*

# A home directory: vLLM and Triton keep what they compile in it. The uid is that of apache/spark's images.
RUN groupadd --gid 185 spark && useradd --uid 185 --gid 185 --no-log-init --create-home spark

# A layer of 9 GB, which a new wheel does not change.
RUN --mount=type=bind,source=requirements/gpu.lock,target=/tmp/gpu.lock \
    python3 -m venv /opt/pipemax/engine \
    && /opt/pipemax/engine/bin/pip install --no-cache-dir --no-deps --requirement /tmp/gpu.lock

RUN --mount=type=bind,source=dist,target=/tmp/dist \
    /opt/pipemax/engine/bin/pip install --no-cache-dir --no-deps /tmp/dist/pipemax_spark-*.whl \
    && /opt/pipemax/engine/bin/pip check

ENV PATH=/opt/pipemax/engine/bin:${PATH}
WORKDIR /home/spark
USER 185:185
CMD ["pipemax", "doctor"]
