# syntax=docker/dockerfile:1
# megatron-adacc in a container, as one of two images:
#
#   gpu   8 x V100 and newer, up to Hopper: CUDA 12.6, PyTorch built for it, apex with its CUDA extensions
#   cpu   everything that runs without a GPU: planning, tracing, small trainings over gloo
#
#   docker build --target gpu -t megatron-adacc --build-arg ADACC_PIP_ARGS="--index-url A --extra-index-url B" .
#
# A is the pip index of PyTorch's builds for CUDA 12.6, or for the CPU; B your usual index. scripts/setup.sh installs, with
# requirements.lock as constraints. The versions below are those of that file, and the build stops at others.

ARG CUDA_VERSION=12.6.3
ARG PYTHON_VERSION=3.12

FROM scratch AS source
COPY README.md pyproject.toml requirements.lock pretrain_gpt.py /
COPY configs /configs
COPY kernels /kernels
COPY megatron_adacc /megatron_adacc
COPY patches /patches
COPY scripts /scripts

# ---- with GPUs: Python with its headers and a C++ compiler, which torch.compile and Triton need ----

FROM nvidia/cuda:${CUDA_VERSION}-base-ubuntu24.04 AS gpu-base
ARG PYTHON_VERSION
RUN apt-get update && \
    apt-get install --yes --no-install-recommends \
        ca-certificates g++ python${PYTHON_VERSION} python${PYTHON_VERSION}-dev python${PYTHON_VERSION}-venv && \
    rm -rf /var/lib/apt/lists/*

# ---- the virtual environment, at the path where it will be used: it cannot be moved ----

FROM nvidia/cuda:${CUDA_VERSION}-devel-ubuntu24.04 AS gpu-build
ARG PYTHON_VERSION
RUN apt-get update && \
    apt-get install --yes --no-install-recommends \
        ca-certificates g++ git ninja-build \
        python${PYTHON_VERSION} python${PYTHON_VERSION}-dev python${PYTHON_VERSION}-venv && \
    rm -rf /var/lib/apt/lists/*
WORKDIR /opt/megatron-adacc
COPY --from=source / ./
ARG ADACC_PIP_ARGS
ARG TORCH_VERSION=2.14.1
ARG TRITON_VERSION=3.8.0
ARG MEGATRON_CORE_VERSION=0.19.2
RUN --mount=type=cache,target=/root/.cache/pip \
    test -n "${ADACC_PIP_ARGS}" || { echo "ADACC_PIP_ARGS is missing: see the head of the Dockerfile." >&2; exit 2; } && \
    ADACC_PYTHON=python${PYTHON_VERSION} bash scripts/setup.sh && \
    .venv/bin/python -m pip list --format=freeze >/tmp/installed && \
    grep -Fx "torch==${TORCH_VERSION}+cu126" /tmp/installed && \
    grep -Fx "triton==${TRITON_VERSION}" /tmp/installed && \
    grep -Fx "megatron-core==${MEGATRON_CORE_VERSION}" /tmp/installed
# Why this commit: torch 2.14 compiles extensions as C++20, for which apex was mended in March and May 2026 (f199212d,
# 1bcf66dc), after its last tag, 25.09. It has all that megatron-core imports (FusedAdam, FusedSGD, amp_C, FusedLayerNorm,
# fused_weight_gradient_mlp_cuda), and takes the choice of extensions from the environment, as pip needs.
ARG APEX_COMMIT=6424da3b4faa6c8f062da4a48c424fff3f02d42d
# What CUDA 12.6 can compile for, from Volta on; Blackwell needs CUDA 12.8.
ENV TORCH_CUDA_ARCH_LIST="7.0;7.5;8.0;8.6;9.0"
RUN git init --quiet /tmp/apex && \
    git -C /tmp/apex fetch --quiet --depth 1 https://github.com/NVIDIA/apex ${APEX_COMMIT} && \
    git -C /tmp/apex checkout --quiet --detach ${APEX_COMMIT} && \
    APEX_CPP_EXT=1 APEX_CUDA_EXT=1 APEX_PARALLEL_BUILD=4 \
        .venv/bin/python -m pip install --no-deps --no-build-isolation --no-cache-dir /tmp/apex && \
    .venv/bin/python -c "import torch, amp_C, fused_layer_norm_cuda, fused_weight_gradient_mlp_cuda" && \
    rm -rf /tmp/apex

FROM gpu-base AS gpu
RUN useradd --create-home --uid 10001 adacc
COPY --from=gpu-build /opt/megatron-adacc /opt/megatron-adacc
WORKDIR /opt/megatron-adacc
# Megatron wants one hardware queue where tensor parallelism overlaps communication, on GPUs before Blackwell.
ENV PATH=/opt/megatron-adacc/.venv/bin:${PATH} CUDA_DEVICE_MAX_CONNECTIONS=1
RUN install --directory --owner=adacc runs
USER adacc
HEALTHCHECK --interval=5m --timeout=2m --start-period=2m CMD ["adacc", "doctor"]
CMD ["adacc", "doctor"]

# ---- without a GPU ----

FROM python:${PYTHON_VERSION}-slim-bookworm AS cpu
RUN apt-get update && \
    apt-get install --yes --no-install-recommends g++ && \
    rm -rf /var/lib/apt/lists/* && \
    useradd --create-home --uid 10001 adacc
WORKDIR /opt/megatron-adacc
COPY --from=source / ./
ARG PYTHON_VERSION
ARG ADACC_PIP_ARGS
ARG TORCH_VERSION=2.14.1
ARG MEGATRON_CORE_VERSION=0.19.2
RUN --mount=type=cache,target=/root/.cache/pip \
    test -n "${ADACC_PIP_ARGS}" || { echo "ADACC_PIP_ARGS is missing: see the head of the Dockerfile." >&2; exit 2; } && \
    ADACC_PYTHON=python${PYTHON_VERSION} bash scripts/setup.sh && \
    .venv/bin/python -m pip list --format=freeze >/tmp/installed && \
    grep -Fx "torch==${TORCH_VERSION}+cpu" /tmp/installed && \
    grep -Fx "megatron-core==${MEGATRON_CORE_VERSION}" /tmp/installed && \
    install --directory --owner=adacc runs
ENV PATH=/opt/megatron-adacc/.venv/bin:${PATH}
USER adacc
HEALTHCHECK --interval=5m --timeout=2m --start-period=2m CMD ["adacc", "doctor"]
CMD ["adacc", "doctor"]
