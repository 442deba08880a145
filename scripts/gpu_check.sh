#!/usr/bin/env bash
# Uses a GPU to the full within nine minutes: builds for it, runs its tests, the sanitizers and the
# benchmark, tries the kernels in other shapes, and leaves logs, report.txt and a picture in one
# folder. `make build/tune_kernels-sm_90` beforehand, on any machine with nvcc, saves a minute.
#
#   scripts/gpu_check.sh [--dry-run] [FOLDER]     FOLDER is results/gpu_check unless given
#
#   PYTHON=python3       has a CUDA PyTorch, ninja, pytest, hypothesis and matplotlib; nothing is
#                        installed, and no setting of the GPU is changed
#   SECONDS_IN_ALL=540   what all steps together may take
#
# Each step has its own limit; one that fails leaves the others alone. What is timed runs alone, tests
# and sanitizers side by side. The exit code is 1 if one failed, 2 if there is nothing to check.
set -uo pipefail
cd "$(dirname "$0")/.."

dry_run=
if [ "${1:-}" = --dry-run ]; then
  dry_run=yes
  shift
fi
out=${1:-results/gpu_check}
python=${PYTHON:-python3}
seconds_in_all=${SECONDS_IN_ALL:-540}

# step NAME LIMIT COMMAND...
step() {
  local name=$1 limit=$2 log=$out/$1.log start=$SECONDS code=0 left
  shift 2
  if [ -n "$dry_run" ]; then
    printf '\n%s, at most %d s:\n   %s\n' "$name" "$limit" "$*"
    return
  fi
  left=$((seconds_in_all - SECONDS))
  if ((left < 10)); then
    echo "not started: the $seconds_in_all s of all steps are used up" > "$log"
    code=125
  else
    printf '%s (%d s so far)\n' "$name" "$SECONDS"
    ((limit <= left)) || limit=$left
    timeout --kill-after=5 "$limit" "$@" > "$log" 2>&1 < /dev/null || code=$?
    ((code == 0)) || tail -n 15 "$log" | awk '{ print "    " $0 }'
  fi
  local result=passed
  case $code in
    0) ;;
    124 | 137) result="out of time" ;;
    125) result="not started" ;;
    *) result="failed ($code)" ;;
  esac
  # The line that says most: the last one, without pytest's frame.
  printf '%-14s %-13s %4d of %3d s  %s\n' "$name" "$result" $((SECONDS - start)) "$limit" \
    "$(grep -v '^[= ]*$' "$log" | tail -n 1 | sed -E 's/^=+ | =+$//g')" >> "$out/report.txt"
}

if [ -n "$dry_run" ]; then
  capability='<of the GPU>'
  tuning=build/tune_kernels-sm_NN
else
  capability=$("$python" -c 'import torch
assert torch.version.cuda, f"PyTorch {torch.__version__} is built without CUDA"
assert torch.cuda.is_available(), f"PyTorch {torch.__version__} sees no GPU"
print(*torch.cuda.get_device_capability(), sep=".")' 2>&1 | tail -n 1)
  [[ $capability =~ ^[0-9]+\.[0-9]+$ ]] || {
    echo "gpu_check.sh: $python: $capability" >&2
    exit 2
  }
  tuning=build/tune_kernels-sm_${capability/./}
  mkdir -p "$out" && rm -f "$out"/*.{log,json,png,xml,txt}
  printf '%s, %s\n' "${COMMIT:-$(git describe --always --dirty --abbrev=40 2> /dev/null)}" \
    "$(date -u +%FT%TZ)" > "$out/report.txt"
  rm -f .venv/.built # the build below replaces what make remembers
fi
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 AMP_EXT_REQUIRE_CUDA=1

pytest=("$python" -m pytest -p no:cacheprovider)
parallel=()
! "$python" -c 'import xdist' 2> /dev/null || parallel=(-n "$(nproc)" --dist worksteal)
# Without PyTorch's cache of memory each tensor is an allocation that the sanitizer knows.
sanitizer=$(command -v compute-sanitizer || echo "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")
sanitize=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --error-exitcode 9 --print-limit 20)
benchmark=("$python" -m amp_ext.bench --device cuda)

step build 200 env AMP_EXT_CUDA=1 TORCH_CUDA_ARCH_LIST="$capability" MAX_JOBS="$(nproc)" \
  "$python" setup.py build_ext --inplace
step tuning-build 120 make "$tuning"
# Which constants of csrc/cuda this GPU would like better: the last lines of its log.
step tuning 75 "$tuning"
step benchmark 110 "${benchmark[@]}" --quick --json "$out/benchmark.json"
step picture 30 "$python" benchmarks/plot.py "$out/benchmark.json" "$out/benchmark.png"
step low-memory 75 "${benchmark[@]}" --json "$out/low-memory.json" \
  --filter 'bf16 \+ split,|split8? \+ (bf16|8bit) states|bf16 \+ bf16 states|fp32 \+ 8bit states'
# Graphs, streams, waiting, launches.
step gpu-tests 100 "${pytest[@]}" tests/operations/test_gpu.py -v -rA --junitxml "$out/gpu-tests.xml" &
# What the emulator and the CPU run needs no GPU.
step suite 280 "${pytest[@]}" -q -rfE --durations 10 "${parallel[@]}" --junitxml "$out/suite.xml" \
  -k 'not emulat and not cpu' --ignore tests/operations/test_gpu.py tests &
for tool in memcheck racecheck synccheck initcheck; do
  options=()
  # PyTorch calls the driver with questions whose answer may be no.
  [ $tool != memcheck ] || options=(--report-api-errors no --padding 64)
  step $tool 280 "${sanitize[@]}" --tool $tool "${options[@]}" "$python" tests/gpu_cases.py &
done
wait

[ -z "$dry_run" ] || exit 0
"$python" -m amp_ext.info | tee "$out/info.txt"
cat "$out/report.txt"
! grep -qE '^\S+ +(failed|out of|not started)' "$out/report.txt"
