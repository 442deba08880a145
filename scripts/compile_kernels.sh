#!/usr/bin/env bash
# Compiles every csrc/cuda/*.cu with nvcc alone (no PyTorch header in reach) for the architectures
# that people train on, then reads the machine code: check_machine_code.py says what it must be like.
#
#   PYTHON=.venv/bin/python   has nvdisasm among its packages, if neither the PATH nor the toolkit has
#   MAX_JOBS=2                compiles so many files at once
#   ARCHITECTURES='80 90 100' are compiled for; the CUDA build reads its own machine code for sm_90
set -euo pipefail
cd "$(dirname "$0")/.."

command -v nvcc > /dev/null || {
  echo "compile_kernels.sh: nvcc is not on the PATH; the CUDA kernels cannot be checked" >&2
  exit 1
}
compgen -G 'csrc/cuda/*.cu' > /dev/null || {
  echo "compile_kernels.sh: there is no csrc/cuda/*.cu" >&2
  exit 1
}
python=${PYTHON:-.venv/bin/python}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

known=$(nvcc --list-gpu-arch)
architectures=
for number in ${ARCHITECTURES:-80 90 100}; do
  # CUDA 12.8 is the first to know the last.
  ! grep -qx "compute_$number" <<< "$known" ||
    architectures+=" -gencode=arch=compute_$number,code=sm_$number"
done

# What setup.py and PyTorch pass, but for the language standard: here the oldest we support.
compile() {
  nvcc -c "$1" -o "$2/$(basename "$1").o" -Icsrc -Iamp_ext/include -std=c++17 -O3 -fmad=false $3 \
    -DAMP_EXT_WITH_CUDA=1 --expt-relaxed-constexpr -Xptxas -v -Werror all-warnings \
    -D__CUDA_NO_HALF_OPERATORS__ -D__CUDA_NO_HALF_CONVERSIONS__ \
    -D__CUDA_NO_BFLOAT16_CONVERSIONS__ -D__CUDA_NO_HALF2_OPERATORS__ \
    --keep --keep-dir "$2" > "$2/$(basename "$1").log" 2>&1 || {
    cat "$2/$(basename "$1").log" >&2
    return 1
  }
}
export -f compile
printf '%s\0' csrc/cuda/*.cu |
  xargs -0 -P "${MAX_JOBS:-$(nproc)}" -I{} bash -c 'compile "$@"' _ {} "$out" "$architectures"
"$python" scripts/check_machine_code.py "$out"
