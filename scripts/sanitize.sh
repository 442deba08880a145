#!/usr/bin/env bash
# Runs the tests over a CPU engine and over CUDA kernels on the emulator that are compiled with
# AddressSanitizer and UndefinedBehaviorSanitizer, and every kernel under ThreadSanitizer.
#
# AddressSanitizer sees accesses outside a tensor's memory, the other one misaligned accesses,
# overflows and the like. The emulated kernels run in a random order.
# ThreadSanitizer takes the threads of a block for threads: it sees a missing barrier. Arguments go
# to pytest (scripts/sanitize.sh -k adam, scripts/sanitize.sh tests/scaler/test_nonfinite.py); without any,
# all tests that reach memory run, of both engines.
#
#   WORKERS='-n 2'   pytest's, for pytest-xdist, where all run
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
python=$(realpath --no-symlinks "$(command -v "${PYTHON:-.venv/bin/python}")")
build=("$python" tests/cuda_emulator/build.py)
export CUDA_EMULATOR_SANITIZERS=address,undefined
# Older sanitizers do not find their way where addresses are very random.
! setarch -R true 2> /dev/null || run="setarch -R"

echo "Building the modules with $CUDA_EMULATOR_SANITIZERS"
module=$("${build[@]}" cpu $CUDA_EMULATOR_SANITIZERS)
"${build[@]}" emulated $CUDA_EMULATOR_SANITIZERS > /dev/null
grep -q __asan_report "$module"

echo "Running every kernel under ThreadSanitizer"
program=$("${build[@]}" program thread)
for seed in '' 1 2; do
  env ${seed:+CUDA_EMULATOR_SEED=$seed} TSAN_OPTIONS=atexit_sleep_ms=0 ${run:-} "$program"
done

# The package, file by file, with the module just built in place of its own.
package=$root/build/sanitize/amp_ext
rm -rf "$package"
mkdir -p "$package"
cp -rs "$root/amp_ext/." "$package"
rm -rf "$package"/_C.*.so "$package"/lib "$package"/_build_info.json # that module links no library
ln -s "$module" "$package"
cd "$package/.."

echo "Running the tests"
# Before Python, which knows nothing of them; the C++ library too, or the first exception ends it.
preload="$(${CXX:-g++} -print-file-name=libasan.so) $(${CXX:-g++} -print-file-name=libstdc++.so)"
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
export PYTHONPATH=$PWD CUDA_EMULATOR_SEED=1
checked() {
  ${run:-} env LD_PRELOAD="$preload" "$python" "$@"
}
# Without a path those that reach memory run. Not ranks, which have a minute each. Programs start compilers, or
# Python in an environment without these, want the library that this module does not link, or memory not to
# grow, while AddressSanitizer keeps for a while what is freed. The trainer calls what the other folders do.
tests() {
  local argument paths=() options=()
  for argument; do
    case $argument in
      "$root"/*) paths+=("$argument") ;;
      tests | tests/*) paths+=("$root/$argument") ;; # as it is seen from the checkout
      *) options+=("$argument") ;;
    esac
  done
  [ ${#paths[@]} -gt 0 ] ||
    paths=("$root"/tests/{operations,optimizers,scaler,state_machine,"programs/test_cpp.py::test_a_bad_call_is_refused_in_python"})
  checked -m pytest -q -r fE --rootdir "$root" -c "$root/pyproject.toml" -p no:cacheprovider \
    "${options[@]}" "${paths[@]}"
}
checked -c 'import sys; from amp_ext import ops
if not ops._C.__file__.startswith(sys.argv[1]): sys.exit(f"another module is used: {ops._C}")' "$PWD"
if [ $# -gt 0 ]; then
  tests "$@"
else
  read -ra workers <<< "${WORKERS:-}"
  tests "${workers[@]}" -k 'not emulated' || failed=1
  tests "${workers[@]}" -k emulated || failed=1
  exit ${failed:-0}
fi
