#!/usr/bin/env bash
# Checks and measures amp_ext on a GPU by one of three lists of rows, each of at most nine minutes.
#
#   scripts/gpu_check.sh [--list kernels|training|tests] [--dry-run] [FOLDER]
#
#   --list kernels    (default) builds, then tests bits and bandwidth of the kernels, with sanitizers
#   --list training   builds, then times whole training and other packages' optimizers
#   --list tests      builds, then runs the whole test suite and tries the kernels in other shapes
#   --dry-run         prints each row with its limit, and the sum of the limits
#   FOLDER            takes logs, figures and report.txt: results/gpu_check-LIST unless given
#
#   PYTHON=python3       has a CUDA PyTorch, ninja, pytest, hypothesis and matplotlib; nothing is
#                        installed, and no setting of the GPU is changed
#   PYTHONPATH           may name a folder with the packages of other optimizers (benchmarks/peers.py)
#   SECONDS_IN_ALL=540   what all rows together may take
#
# Each row has its own limit, and a row that fails leaves the others alone. report.txt gets a line when
# a row ends; rows with figures come first. Rows that are timed run alone, tests and sanitizers side by
# side. The exit code is 1 if a row failed, 2 if there is nothing to check.
set -uo pipefail
cd "$(dirname "$0")/.."

usage() {
  echo "usage: scripts/gpu_check.sh [--list kernels|training|tests] [--dry-run] [FOLDER]" >&2
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
[[ $list =~ ^(kernels|training|tests)$ ]] || usage
out=${out:-results/gpu_check-$list}
python=${PYTHON:-python3}
seconds_in_all=${SECONDS_IN_ALL:-540}
sum=0     # of the limits
longest=0 # limit of the rows that run side by side

# run NAME LIMIT COMMAND...
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
  # The line that says most: the last one, without pytest's frame.
  printf '%-14s %-13s %4d of %3d s  %s\n' "$name" "$result" $((SECONDS - start)) "$limit" \
    "$(grep -v '^[= ]*$' "$log" | tail -n 1 | sed -E 's/^=+ | =+$//g')" >> "$out/report.txt"
}

show() {
  printf '\n%s, at most %d s:\n   %s\n' "$1" "$2" "${*:3}"
}

# A row that runs alone: row NAME LIMIT COMMAND...
row() {
  sum=$((sum + $2))
  if [ -n "$dry_run" ]; then show "$@"; else run "$@"; fi
}

# A row that runs beside those before and after it, until `join`.
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
  mkdir -p "$out" && rm -f "$out"/*.{log,json,md,png,xml,txt}
  printf '%s, %s\n' "${COMMIT:-$(git describe --always --dirty --abbrev=40 2> /dev/null)}" \
    "$(date -u +%FT%TZ)" > "$out/report.txt"
  rm -f .venv/.built # the build below replaces what make remembers
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 AMP_EXT_REQUIRE_CUDA=1

pytest=("$python" -m pytest -p no:cacheprovider)
benchmark=("$python" -m amp_ext.bench --device cuda)
gpu_tests=("${pytest[@]}" tests/operations/test_gpu.py -v -rA)
# Without PyTorch's cache of memory each tensor is an allocation that the sanitizer knows.
sanitizer=$(command -v compute-sanitizer || echo "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")
sanitize=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --error-exitcode 9 --print-limit 20)

row build 200 env AMP_EXT_CUDA=1 TORCH_CUDA_ARCH_LIST="$capability" MAX_JOBS="$(nproc)" \
  "$python" setup.py build_ext --inplace
case $list in
  kernels)
    row sequences 20 "${gpu_tests[@]}" -k sequences
    # Low-memory steps, by the fast path and by the general kernels.
    row fast-path 75 "$python" benchmarks/fast_path.py --seconds 0.15 --json "$out/fast-path.json"
    row bandwidth 85 "${benchmark[@]}" --quick --json "$out/bandwidth.json"
    beside bits 150 "$python" scripts/hash_steps.py --check --engines cuda --workers 9
    # Graphs, streams, waiting, launches.
    beside gpu-tests 100 "${gpu_tests[@]}" -k 'not sequences'
    for tool in memcheck racecheck synccheck initcheck; do
      options=()
      # PyTorch calls the driver with questions whose answer may be no.
      [ $tool != memcheck ] || options=(--report-api-errors no --padding 64)
      beside $tool 150 "${sanitize[@]}" --tool $tool "${options[@]}" "$python" tests/gpu_cases.py
    done
    join
    ;;
  training)
    row training 205 "$python" benchmarks/training.py --device cuda --seconds 190 --out "$out"
    row peers 130 "$python" benchmarks/peers.py --device cuda --seconds 115 --out "$out"
    ;;
  tests)
    parallel=()
    ! "$python" -c 'import xdist' 2> /dev/null || parallel=(-n "$(nproc)" --dist worksteal)
    # The emulator and the CPU need no GPU for their rows.
    row suite 180 "${pytest[@]}" -q -rfE --durations 10 "${parallel[@]}" \
      --junitxml "$out/suite.xml" -k 'not emulat and not cpu' tests
    # The last lines of the second log say which constants of csrc/cuda suit this GPU better.
    # `make build/tune_kernels-sm_90` beforehand, on any machine with nvcc, saves a minute.
    row tuning-build 100 make "$tuning"
    row tuning 60 "$tuning"
    ;;
esac

if [ -n "$dry_run" ]; then
  printf '\n%d s at most\n' "$sum"
  exit 0
fi
"$python" -m amp_ext.info | tee "$out/info.txt"
cat "$out/report.txt"
! grep -qE '^\S+ +(failed|out of|not started)' "$out/report.txt"
