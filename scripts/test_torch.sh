#!/usr/bin/env bash
# Builds amp_ext for the CPU with any release of PyTorch, from the source distribution, and runs the quick
# tests and those of ranks and of programs in C++ with it. Says which private parts of PyTorch have moved. All
# files are in .venv-torch/<version of PyTorch>; the checkout's build is unchanged.
#
#   TORCH=2.15.0             version of PyTorch; its environment (several GB) is created if it is missing
#   BASE_PYTHON=python3.11   Python that creates the environment
#   arguments                are passed to pytest
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/own_environment.sh
torch=${TORCH:-2.15.0}
tests=$PWD/tests
export AMP_EXT_CUDA=0
make_torch_environment "$torch"

echo "Building for PyTorch $torch (log: $home/build.log)"
copy_sources "$home/source_cpu"
install_copy "$home/source_cpu"
"$python" -W ignore scripts/private_parts.py

run() {
  (cd "$home" && "$python" -m pytest -q -rfE -p no:cacheprovider "$@")
}
slow=("$tests"/distributed)
if set_toolkit; then
  slow+=("$tests"/programs/test_{cmake,cpp}.py)
else
  echo "no CUDA toolkit: the tests of programs in C++ are left out"
fi
run "${slow[@]}" -m slow
# Leaves out the tests of the checkout itself, as cuda_build.sh does.
run "$tests" -m 'not slow' -k 'not emulated' \
  --ignore-glob="$tests"/programs/test_{bench,docs,scripts,setup}'*.py' "$@"
echo "passed for PyTorch $torch in $SECONDS s"
