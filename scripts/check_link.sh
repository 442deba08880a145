#!/usr/bin/env bash
# Links everything but the bindings into a shared library with no Python in it. An undefined symbol
# means that a file below bindings.cpp needs Python. Uses the objects of the last build in place.
#
# Then looks for functions that the linker may share between a CPU engine and other sources: of two
# copies it takes any, and one with AVX-512 in it would end the plain engine too.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}

read -r build binary torch_lib < <("$python" -c 'import sys, sysconfig
from torch.utils.cpp_extension import library_paths
build = f"build/temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
print(build, "amp_ext/_C" + sysconfig.get_config_var("EXT_SUFFIX"), library_paths()[0])')

sources=(csrc/*.cpp csrc/cpu/*.cpp)
! grep -q AMP_EXT_WITH_CUDA amp_ext/_build_info.json || sources+=(csrc/cuda/*.cu)
objects=()
for source in "${sources[@]}"; do
  [ "$source" = csrc/bindings.cpp ] || objects+=("$build/${source%.*}.o")
done
# What the binary itself is linked with, but for Python's libraries.
mapfile -t libraries < <(LD_LIBRARY_PATH="$torch_lib" ldd "$binary" |
  awk '$3 ~ "^/" && $1 !~ /python/ {print $3}')

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
${CXX:-c++} -shared -fopenmp -Wl,-z,defs -o "$out/libamp_ext.so" "${objects[@]}" "${libraries[@]}"
echo "linked ${#objects[@]} objects with ${#libraries[@]} libraries, none of Python"

for object in "$build"/csrc/cpu/engine_*.o; do
  isa=$(basename "$object" .o)
  isa=${isa#engine_}
  if nm -C --defined-only "$object" | grep ' [uVW] ' | grep -v "amp_ext::cpu::$isa::"; then
    echo "check_link.sh: the linker may take these from $object for all" >&2
    exit 1
  fi
done
echo "no function of a CPU engine is shared"
