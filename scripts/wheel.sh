#!/usr/bin/env bash
# Builds a wheel into dist/, installs it elsewhere, and tests it there, from Python and from a C++ program.
#
#   PYTHON=.venv/bin/python    Python with the PyTorch to build for. The wheel is tried in an empty environment.
#   TORCHES="2.13.0 2.14.1"    instead, the releases of PyTorch to build one wheel for, the oldest first. Each
#                              is built and tried in its own environment, .venv-torch/2.13.0 (several GB).
#   BASE_PYTHON=python3.11     Python that creates these environments
#
# The name of a wheel for one PyTorch shows it: amp_ext-0.1.0+torch2.13cpu-cp311-...whl. The suffix is a local
# version, not a build number, so that pip distinguishes such wheels and can install one by version:
# amp-ext==0.1.0+torch2.13cpu. The wheel requires that minor release, torch==2.13.*, so that pip neither
# combines it with another PyTorch nor replaces the installed one. A wheel for several releases is named
# amp_ext-0.1.0+cpu-cp311-...whl, and requires these: torch>=2.13,<2.15.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
source scripts/own_environment.sh
mkdir -p dist

# Builds a wheel with $python in the folder $1; sets $torch to the PyTorch, and $wheel.
build_wheel() {
  local tag
  copy_sources "$1"
  rm -rf "$1/dist"
  cd "$1"
  "$python" setup.py build > build.log 2>&1 || { cat build.log >&2; exit 1; }
  read -r torch tag < <("$python" -W ignore -c 'import json, pathlib, sys
(file,) = pathlib.Path("build").glob("lib*/amp_ext/_build_info.json")
info = json.loads(file.read_text())
minor = ".".join(info["torch"].split(".")[:2])
cuda = "cu" + info["cuda"].replace(".", "") if info["cuda"] else "cpu"
print(info["torch"], cuda if sys.argv[1] else f"torch{minor}{cuda}")' "${TORCHES:-}")
  [ -z "${TORCHES:-}" ] || tag=${first_tag:=$tag} # the CUDA of the kernels, which the first build compiles
  "$python" setup.py egg_info --tag-build "+$tag" bdist_wheel --skip-build --dist-dir dist \
    >> build.log 2>&1 || { cat build.log >&2; exit 1; }
  wheel=$(realpath dist/*.whl)
  cd "$root"
}

# Tries $wheel, which is installed for $python, in the folder $1. It must ask for the PyTorch $2.
try_wheel() {
  cd "$1"
  "$python" -W ignore -c 'import sys
from importlib.metadata import requires
asked = [each for each in requires("amp-ext") if each.startswith("torch") and "extra" not in each]
assert asked == [sys.argv[1]], f"the wheel must ask for {sys.argv[1]}, got {asked}"' "$2"
  "$python" -W ignore -m amp_ext.info --check
  if command -v cmake > /dev/null && set_toolkit; then
    {
      cmake -S "$root/tests/cpp/smoke" -B smoke -Damp_ext_DIR="$("$python" -W ignore -m amp_ext.cmake)" &&
        cmake --build smoke
    } > log 2>&1 || { cat log >&2; exit 1; }
    smoke/smoke
  fi
  cd "$root"
}

if [ -n "${TORCHES:-}" ]; then
  mkdir -p build/wheels
  export AMP_EXT_KERNELS=$root/build/wheels/libamp_ext_kernels.so
  rm -f "$AMP_EXT_KERNELS"
  wheels=()
  for torch in $TORCHES; do
    make_torch_environment "$torch"
    echo "Building for PyTorch $torch (log: build/wheels/$torch/build.log)"
    build_wheel "build/wheels/$torch"
    wheels+=("$wheel")
  done
  read -r wheel wanted < <("$python" scripts/merge_wheels.py "$root/dist" "${wheels[@]}")
else
  python=$(realpath --no-symlinks "$(command -v "${PYTHON:-.venv/bin/python}")")
  build_wheel build/wheel
  cp "$wheel" dist/
  wanted="torch==$(cut -d. -f1,2 <<< "$torch").*"
fi
echo "Built dist/${wheel##*/}, $(stat -c %s "$wheel") bytes"

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
if [ -n "${TORCHES:-}" ]; then
  for torch in $TORCHES; do
    make_torch_environment "$torch"
    "$python" -m pip install -qq --no-index --no-deps --force-reinstall "$wheel"
    mkdir "$out/$torch"
    try_wheel "$out/$torch" "$wanted"
  done
else
  "$python" -m venv "$out/env"
  python=$out/env/bin/python
  "$python" -m pip install -qq --no-cache-dir "torch==$torch"
  "$python" -m pip install -qq --no-index "$wheel" # offline, so that pip must use that PyTorch
  try_wheel "$out" "$wanted"
fi
