# Builds amp_ext for the PyTorch of the image BASE and installs it there: docs/install.md.
ARG BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-devel

FROM ${BASE} AS build
# Debian and Ubuntu forbid pip to change the system's Python unless this variable is set.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
RUN python -m pip install --no-cache-dir "setuptools>=77,<82" wheel ninja
# With 1, the build stops if BASE has no CUDA toolkit, or a PyTorch without CUDA; with 0, it is for the CPU.
ARG AMP_EXT_CUDA=1
ARG TORCH_CUDA_ARCH_LIST
ARG MAX_JOBS
COPY . /amp_ext
RUN python -m pip wheel --no-build-isolation --no-deps --wheel-dir /wheel /amp_ext

# The final image gets the wheel alone. --no-index keeps pip from replacing the PyTorch of BASE.
FROM ${BASE}
RUN --mount=type=bind,from=build,source=/wheel,target=/wheel \
    PIP_BREAK_SYSTEM_PACKAGES=1 python -m pip install --no-cache-dir --no-index /wheel/*.whl && \
    cd / && python -m amp_ext.info --check
