#!/usr/bin/env bash
# Builds a wheel for the PyTorch of this environment into dist/, installs it with that PyTorch into an
# empty environment elsewhere, and tests it there, from Python and from a C++ program.
#
#   PYTHON=.venv/bin/python   Python with the PyTorch to build for
#
# The name of the wheel shows its PyTorch: amp_ext-0.1.0+torch2.13cpu-cp311-...whl. The suffix is a local
# version, not a build number, so that pip distinguishes such wheels and can install one by version:
# amp-ext==0.1.0+torch2.13cpu. The wheel requires that minor release, torch==2.13.*, so that pip neither
# combines it with another PyTorch nor replaces the installed one.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
python=$(realpath --no-symlinks "$(command -v "${PYTHON:-.venv/bin/python}")")
source scripts/own_environment.sh

mkdir -p dist
copy_sources build/wheel
rm -rf build/wheel/dist
cd build/wheel
"$python" setup.py build > build.log 2>&1 || { cat build.log >&2; exit 1; }
read -r torch tag < <("$python" -c 'import json, pathlib
(file,) = pathlib.Path("build").glob("lib*/amp_ext/_build_info.json")
info = json.loads(file.read_text())
minor = ".".join(info["torch"].split(".")[:2])
cuda = "cu" + info["cuda"].replace(".", "") if info["cuda"] else "cpu"
print(info["torch"], f"torch{minor}{cuda}")')
"$python" setup.py egg_info --tag-build "+$tag" bdist_wheel --skip-build --dist-dir dist \
  >> build.log 2>&1 || { cat build.log >&2; exit 1; }
wheel=$(realpath dist/*.whl)
cp "$wheel" "$root/dist/"
echo "Built dist/${wheel##*/}"

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
cd "$out"
"$python" -m venv env
env/bin/python -m pip install -qq --no-cache-dir "torch==$torch"
env/bin/python -m pip install -qq --no-index "$wheel" # offline, so that pip must use that PyTorch
env/bin/python -c 'import sys
from importlib.metadata import requires
wanted = "torch==" + ".".join(sys.argv[1].split(".")[:2]) + ".*"
asked = [each for each in requires("amp-ext") if each.startswith("torch") and "extra" not in each]
assert asked == [wanted], f"the wheel must ask for {wanted}, got {asked}"' "$torch"
env/bin/python -W ignore -m amp_ext.info --check
if command -v cmake > /dev/null; then
  {
    cmake -S "$root/tests/cpp/smoke" -B smoke -Damp_ext_DIR="$(env/bin/python -W ignore -m amp_ext.cmake)" &&
      cmake --build smoke
  } > log 2>&1 || { cat log >&2; exit 1; }
  smoke/smoke
fi
