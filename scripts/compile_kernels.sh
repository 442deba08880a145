#!/usr/bin/env bash
# Compiles every csrc/cuda/*.cu with nvcc alone (no PyTorch header in reach) and refuses spills.
# Prints, per file and architecture: kernels, most registers, largest stack frame, spilled bytes.
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
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

# What setup.py and PyTorch pass, but for the language standard: here the oldest we support.
compile() {
  nvcc -c "$1" -o "$2/$(basename "$1").o" -Icsrc -std=c++17 -O3 -fmad=false \
    -gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=sm_90 \
    -DAMP_EXT_WITH_CUDA=1 --expt-relaxed-constexpr -Xptxas -v -Werror all-warnings \
    -D__CUDA_NO_HALF_OPERATORS__ -D__CUDA_NO_HALF_CONVERSIONS__ \
    -D__CUDA_NO_BFLOAT16_CONVERSIONS__ -D__CUDA_NO_HALF2_OPERATORS__ \
    > "$2/$(basename "$1").log" 2>&1 || {
    cat "$2/$(basename "$1").log" >&2
    return 1
  }
}
export -f compile
printf '%s\0' csrc/cuda/*.cu | xargs -0 -P "$(nproc)" -I{} bash -c 'compile "$1" "$2"' _ {} "$out"

printf '%-28s %-7s %7s %9s %5s %6s\n' file arch kernels registers stack spills
for log in "$out"/*.log; do
  awk -v file="$(basename "$log" .log)" '
    /Compiling entry function/ { split($0, part, "\047"); name = part[2]; arch = part[4]; kernels[arch]++ }
    /bytes stack frame/ {
      if ($1 > stack[arch]) stack[arch] = $1
      spilled = $5 + $9
      spills[arch] += spilled
      if (spilled) print "spills " spilled " bytes on " arch ": " name > "/dev/stderr"
    }
    /Used [0-9]+ registers/ {
      for (i = 1; i < NF; i++) if ($i == "Used" && $(i + 1) > most[arch]) most[arch] = $(i + 1)
    }
    END {
      for (arch in kernels) {
        printf "%-28s %-7s %7d %9d %5d %6d\n", file, arch, kernels[arch], most[arch], stack[arch], spills[arch]
        total += spills[arch]
      }
      exit total > 0
    }' "$log" 2> >(c++filt >&2) || failed=1
done
[ -z "${failed:-}" ] || { echo "compile_kernels.sh: kernels spill registers" >&2; exit 1; }
