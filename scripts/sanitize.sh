#!/usr/bin/env bash
# Runs tests with sanitizers: one CPU engine and the emulated CUDA kernels with AddressSanitizer and
# UndefinedBehaviorSanitizer, and every kernel with ThreadSanitizer.
#
# AddressSanitizer finds accesses outside a tensor's memory, UndefinedBehaviorSanitizer misaligned accesses,
# overflows and the like. Threads of emulated kernels run in random order. ThreadSanitizer treats the
# threads of a block as threads and finds missing barriers. Arguments are passed to pytest, for example
# `-k adam` or tests/optim. Without a path, runs the tests of kernels and operators.
#
#   AMP_EXT_CPU_ISA  plain, avx2 or avx512: the CPU engine to watch (default: the one in use)
#   --cpu            leaves out the emulated kernels, and with them ThreadSanitizer
#   --threads        only runs released gradients and offloaded states, with the whole library and their copies
#                    under ThreadSanitizer
#   WORKERS='-n 2'   options for pytest-xdist
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
python=$(realpath --no-symlinks "$(command -v "${PYTHON:-.venv/bin/python}")")
build=("$python" tests/cuda_emulator/build.py)
export CUDA_EMULATOR_SANITIZERS=address,undefined
# Turns address randomization off if possible, because older sanitizers fail with much of it.
! setarch -R true 2> /dev/null || run="setarch -R"

# Runs Python with the module $1 and the sanitizer library $2. Links the files of the package into a copy, and
# replaces its module.
use_module() {
  package=$root/build/sanitize/amp_ext
  rm -rf "$package"
  mkdir -p "$package"
  cp -rs "$root/amp_ext/." "$package"
  rm -rf "$package"/_C.*.so "$package"/lib "$package"/_build_info.json # the new module needs no library
  ln -s "$1" "$package"
  cd "$package/.."
  # Preloads the sanitizer, because Python is not linked with it, and the C++ library, because otherwise the
  # first exception ends the process.
  preload="$(${CXX:-g++} -print-file-name="$2") $(${CXX:-g++} -print-file-name=libstdc++.so)"
  export PYTHONPATH=$PWD
  checked -c 'import sys; from amp_ext import ops
if not ops._C.__file__.startswith(sys.argv[1]): sys.exit(f"another module is used: {ops._C}")' "$PWD"
}
checked() {
  ${run:-} env LD_PRELOAD="$preload" "$python" "$@"
}
pytest() {
  checked -m pytest -q -r fE --rootdir "$root" -c "$root/pyproject.toml" -p no:cacheprovider "$@"
}

if [ "${1:-}" = --threads ]; then
  # PyTorch and OpenMP are not instrumented, so a parallel region would look like a race.
  export OMP_NUM_THREADS=1 TSAN_OPTIONS=atexit_sleep_ms=0
  echo "Running released gradients and offloaded states under ThreadSanitizer"
  use_module "$("${build[@]}" cpu thread)" libtsan.so
  pytest "$root"/tests/optim/test_{offload,gradient_release}.py -m 'not slow' -k 'not emulated'
  exit
fi

emulates=1
if [ "${1:-}" = --cpu ]; then
  emulates=0
  shift
fi
echo "Building the module with $CUDA_EMULATOR_SANITIZERS"
module=$("${build[@]}" cpu $CUDA_EMULATOR_SANITIZERS)
grep -q __asan_load "$module"

if [ "$emulates" = 1 ]; then
  echo "Running every kernel under ThreadSanitizer"
  program=$("${build[@]}" program thread)
  jobs=()
  for seed in '' 1 2; do
    env ${seed:+CUDA_EMULATOR_SEED=$seed} TSAN_OPTIONS=atexit_sleep_ms=0 ${run:-} "$program" & jobs+=($!)
  done
  for job in "${jobs[@]}"; do wait "$job"; done
fi

echo "Running the tests (the first that emulates compiles for minutes)"
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 CUDA_EMULATOR_SEED=1
use_module "$module" libasan.so
# Tests of ranks, programs and the trainer are not for it: they take a minute each, start other processes, check
# that memory does not grow (AddressSanitizer delays frees), or make the same calls as others.
arguments=()
[[ $* == *tests* ]] || arguments=("$root"/tests/{kernels,ops})
# Other engines than the one in use are not watched, so no result is compared with theirs.
[ "$emulates" = 1 ] || arguments+=(-k 'not emulated and not plain_cpp')
for argument; do
  case $argument in
    tests | tests/*) arguments+=("$root/$argument") ;; # relative to the checkout
    *) arguments+=("$argument") ;;
  esac
done
read -ra workers <<< "${WORKERS:-}"
pytest "${workers[@]}" "${arguments[@]}"
