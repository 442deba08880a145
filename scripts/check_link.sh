#!/usr/bin/env bash
# Checks the objects of the last build in place for mistakes that the linker accepts. (The linker itself
# shows that the library doesn't need Python, because an undefined symbol fails its link.)
#
# - A CPU engine must not share functions with other sources. The linker keeps any one of several copies,
#   and a copy with AVX-512 would crash the plain engine on other processors.
# - The Python module must have no state of amp_ext. All state belongs to the library, which a process
#   loads once.
# - The Python module must export only its init function. Some compilers link parts of their standard
#   library into it, which must not mix with PyTorch's.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}

build=$("$python" -c 'import sys, sysconfig
print(f"build/temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}")')

for object in "$build"/csrc/cpu/engine_*.o; do
  isa=$(basename "$object" .o)
  isa=${isa#engine_}
  if nm -C --defined-only "$object" | grep ' [uVW] ' | grep -v "amp_ext::cpu::$isa::"; then
    echo "check_link.sh: the linker may take these from $object for all" >&2
    exit 1
  fi
done
echo "no function of a CPU engine is shared"

# The build compiles all sources of csrc/python as one generated file.
if nm -C --defined-only "$build/$build/csrc/united/python.o" | grep ' [bBdD] .*amp_ext::' | grep -vE ' (vtable|typeinfo( name)?) for '; then
  echo "check_link.sh: csrc/python has state, which belongs to the library" >&2
  exit 1
fi
echo "the module for Python has no state"

for module in amp_ext/_C.*.so; do
  if nm -D --defined-only "$module" | grep -v ' PyInit__C$'; then
    echo "check_link.sh: $module exports more than PyInit__C" >&2
    exit 1
  fi
done
echo "the module for Python exports nothing but its start"
