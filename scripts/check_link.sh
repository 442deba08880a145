#!/usr/bin/env bash
# Looks at the objects of the last build in place for what the linker does not refuse. (That nothing
# below the bindings needs Python shows there: an undefined name ends the link of the library.)
#
# Functions that it may share between a CPU engine and other sources: of two copies it takes any, and
# one with AVX-512 in it would end the plain engine too. State of amp_ext in the module for Python: all
# of it belongs to the library, of which a process has one. Names that the module exports: some compilers
# link their standard library into it, and a part of that must not be mixed with PyTorch's.
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

# The build unites the sources of csrc/python in one that it writes.
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
