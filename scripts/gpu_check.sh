#!/usr/bin/env bash
# Checks and measures amp_ext on a GPU. Each of the five lists of checks takes at most nine minutes.
#
#   scripts/gpu_check.sh [--list kernels|training|offload|muon|tests] [--dry-run] [FOLDER]
#
#   --list kernels    (default) builds, then tests bits and bandwidth of the kernels, with sanitizers
#   --list training   builds, then times complete training runs and other packages' optimizers
#   --list offload    builds, then tests and times steps with states in host memory
#   --list muon       builds, then tests Muon and times its steps, also in a CUDA graph
#   --list tests      builds, then runs the whole test suite and times other kernel configurations
#   --dry-run         prints each check (row) with its time limit, and the sum of the limits
#   FOLDER            folder for logs, figures and report.txt (results/gpu_check-LIST)
#
#   PYTHON=python3       Python with a CUDA PyTorch, ninja, pytest, hypothesis and matplotlib; nothing
#                        is installed, and no setting of the GPU is changed
#   PYTHONPATH           may name a folder with the packages of other optimizers (benchmarks/peers.py)
#   SECONDS_IN_ALL=540   time limit of all rows together
#
# Each row has its own time limit, and a failed row does not stop the others. report.txt gets a line at the
# end of each row. Timed rows come first and run alone; tests and sanitizers run in parallel. The exit code
# is 1 if a row failed, and 2 if there is no GPU to check.
set -uo pipefail
cd "$(dirname "$0")/.."

usage() {
  echo "usage: scripts/gpu_check.sh [--list kernels|training|offload|muon|tests] [--dry-run] [FOLDER]" >&2
  exit 2
}

list=kernels dry_run= out=
while (($#)); do
  case $1 in
    --list) list=${2:-} && shift ;;
    --dry-run) dry_run=yes ;;
    -*) usage ;;
    *) out=$1 ;;
  esac
  shift
done
[[ $list =~ ^(kernels|training|offload|muon|tests)$ ]] || usage
out=${out:-results/gpu_check-$list}
python=${PYTHON:-python3}
seconds_in_all=${SECONDS_IN_ALL:-540}
sum=0     # sum of the limits so far, in seconds
longest=0 # largest limit of the rows that run in parallel

# Runs a row and reports its result: run NAME LIMIT COMMAND...
run() {
  local name=$1 limit=$2 log=$out/$1.log start=$SECONDS code=0 left
  shift 2
  left=$((seconds_in_all - SECONDS))
  if ((left < 10)); then
    echo "not started: the $seconds_in_all s of all rows are used up" > "$log"
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
  # Reports the last line of the log, which is usually a summary, without pytest's "===" frame.
  printf '%-14s %-13s %4d of %3d s  %s\n' "$name" "$result" $((SECONDS - start)) "$limit" \
    "$(grep -v '^[= ]*$' "$log" | tail -n 1 | sed -E 's/^=+ | =+$//g')" >> "$out/report.txt"
}

show() {
  printf '\n%s, at most %d s:\n   %s\n' "$1" "$2" "${*:3}"
}

# Runs a row alone: row NAME LIMIT COMMAND...
row() {
  sum=$((sum + $2))
  if [ -n "$dry_run" ]; then show "$@"; else run "$@"; fi
}

# Starts a row in parallel with other such rows, until `join`.
beside() {
  ((longest >= $2)) || longest=$2
  if [ -n "$dry_run" ]; then show "$@"; else run "$@" & fi
}

join() {
  wait
  sum=$((sum + longest))
}

if [ -n "$dry_run" ]; then
  capability='<of the GPU>'
else
  capability=$("$python" -c 'import torch
assert torch.version.cuda, f"PyTorch {torch.__version__} is built without CUDA"
assert torch.cuda.is_available(), f"PyTorch {torch.__version__} sees no GPU"
print(*torch.cuda.get_device_capability(), sep=".")' 2>&1 | tail -n 1)
  [[ $capability =~ ^[0-9]+\.[0-9]+$ ]] || {
    echo "gpu_check.sh: $python: $capability" >&2
    exit 2
  }
  mkdir -p "$out" && rm -f "$out"/*.{log,json,md,png,xml,txt}
  printf '%s, %s\n' "${COMMIT:-$(git describe --always --dirty --abbrev=40 2> /dev/null)}" \
    "$(date -u +%FT%TZ)" > "$out/report.txt"
  rm -f .venv/.built # make's record of its last build, which the build below replaces
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 AMP_EXT_REQUIRE_CUDA=1

pytest=("$python" -m pytest -p no:cacheprovider)
benchmark=("$python" -m amp_ext.bench --device cuda)
gpu_tests=("${pytest[@]}" tests/kernels/test_gpu.py -v -rA)
# Turns PyTorch's memory cache off, so that each tensor is an allocation that the sanitizer can check.
sanitizer=$(command -v compute-sanitizer || echo "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")
sanitize=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --error-exitcode 9 --print-limit 20)

row build 200 env AMP_EXT_CUDA=1 TORCH_CUDA_ARCH_LIST="$capability" MAX_JOBS="$(nproc)" \
  "$python" setup.py build_ext --inplace
case $list in
  kernels)
    row sequences 20 "${gpu_tests[@]}" -k sequences
    # Times low-memory steps with the fast path and with the general kernels.
    row fast-path 75 "$python" benchmarks/fast_path.py --seconds 0.15 --json "$out/fast-path.json"
    row bandwidth 85 "${benchmark[@]}" --quick --json "$out/bandwidth.json"
    beside bits 150 "$python" scripts/hash_steps.py --check --engines cuda --workers 9
    # Tests CUDA graphs, streams, synchronization and kernel launches.
    beside gpu-tests 100 "${gpu_tests[@]}" -k 'not sequences'
    for tool in memcheck racecheck synccheck initcheck; do
      options=()
      # Ignores API errors, because PyTorch makes driver calls that may fail, to query features.
      [ $tool != memcheck ] || options=(--report-api-errors no --padding 64)
      beside $tool 150 "${sanitize[@]}" --tool $tool "${options[@]}" "$python" tests/gpu_cases.py
    done
    join
    ;;
  training)
    row training 205 "$python" benchmarks/training.py --device cuda --seconds 190 --out "$out"
    row peers 130 "$python" benchmarks/peers.py --device cuda --seconds 115 --out "$out"
    ;;
  offload)
    row equality 40 "${gpu_tests[@]}" -k offload
    # Fails if a step takes much longer than its slowest part, or the peak of GPU memory is not as documented.
    row steps 190 "$python" benchmarks/offload.py --device cuda --check
    row training 110 "$python" benchmarks/training.py --device cuda --seconds 95 --out "$out" \
      --sides 'by hand|float32 masters|split8|5 bytes|offloaded'
    ;;
  muon)
    row float32 45 "$python" benchmarks/muon.py --device cuda --rounds 20
    row bfloat16 45 "$python" benchmarks/muon.py --device cuda --dtype bfloat16 --rounds 20
    row muon-bits 140 "${pytest[@]}" -q tests/optim/test_muon.py tests/optim/test_muon_groups.py \
      -k 'not emulat and not cpu'
    row muon-memcheck 110 "${sanitize[@]}" --tool memcheck --report-api-errors no "${pytest[@]}" -q \
      tests/optim/test_muon.py -k 'cuda and (skipped or sixteen or adamw)'
    ;;
  tests)
    parallel=()
    ! "$python" -c 'import xdist' 2> /dev/null || parallel=(-n "$(nproc)" --dist worksteal)
    # Leaves out the tests of the emulator and the CPU, which need no GPU.
    row suite 180 "${pytest[@]}" -q -rfE --durations 10 "${parallel[@]}" \
      --junitxml "$out/suite.xml" -k 'not emulat and not cpu' tests
    ;;
esac

if [ -n "$dry_run" ]; then
  printf '\n%d s at most\n' "$sum"
  exit 0
fi
"$python" -m amp_ext.info | tee "$out/info.txt"
cat "$out/report.txt"
! grep -qE '^\S+ +(failed|out of|not started)' "$out/report.txt"
