#!/usr/bin/env bash
# Compiles every csrc/cuda/*.cu with nvcc and without PyTorch's headers, for the usual GPU architectures of
# training, then checks the machine code with check_machine_code.py.
#
#   PYTHON=.venv/bin/python   Python with the nvdisasm package, if PATH and toolkit have no nvdisasm
#   MAX_JOBS=2                number of files to compile at once
#   ARCHITECTURES='80 90 100' compute capabilities; cuda_build.sh checks its own machine code for sm_90
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

# Architectures that nvcc doesn't know are left out: 100 needs CUDA 12.8.
known=$(nvcc --list-gpu-arch)
architectures=()
for number in ${ARCHITECTURES:-80 90 100}; do
  ! grep -qx "compute_$number" <<< "$known" || architectures+=("sm_$number")
done

# The flags are those of setup.py and PyTorch, except for the oldest supported language standard.
compile() {
  local compiled=$3/$(basename "$1" .cu).$2
  nvcc -cubin "-arch=$2" "$1" -o "$compiled.cubin" -Icsrc -Icsrc/include -std=c++17 -O3 -fmad=false \
    -DAMP_EXT_WITH_CUDA=1 --expt-relaxed-constexpr -Xptxas -v -Werror all-warnings \
    -D__CUDA_NO_HALF_OPERATORS__ -D__CUDA_NO_HALF_CONVERSIONS__ \
    -D__CUDA_NO_BFLOAT16_CONVERSIONS__ -D__CUDA_NO_HALF2_OPERATORS__ > "$compiled.log" 2>&1 || {
    cat "$compiled.log" >&2
    return 1
  }
}
export -f compile
for architecture in "${architectures[@]}"; do
  printf "%s\0$architecture\0$out\0" csrc/cuda/*.cu
done | xargs -0 -n 3 -P "${MAX_JOBS:-$(nproc)}" bash -c 'compile "$@"' _
"$python" scripts/check_machine_code.py "$out"
