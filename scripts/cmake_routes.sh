#!/usr/bin/env bash
# Builds and runs the program of tests/cpp/smoke in the two ways that compile the library with CMake:
#
#   the sources are a folder of the program's project (add_subdirectory, FetchContent)
#   the library is installed to a prefix and found there, without environment variables
#
# tests/programs/test_cmake.py tests the third way, which uses the library of the Python package.
#
#   PYTHON=.venv/bin/python   Python that has the PyTorch to link
#   MAX_JOBS=2                number of files to compile at once
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
root=$PWD
torch=$("$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parent)')
cmake=$(command -v cmake)
jobs=${MAX_JOBS:-$(nproc)}

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
quietly() {
  "$@" > "$out/log" 2>&1 || {
    cat "$out/log" >&2
    echo "cmake_routes.sh: failed: $*" >&2
    exit 1
  }
}

echo "A project that holds the sources"
quietly "$cmake" -S tests/cpp/smoke -B "$out/inside" -DAMP_EXT_SOURCES="$root" -DCMAKE_PREFIX_PATH="$torch"
quietly "$cmake" --build "$out/inside" -j "$jobs"
"$out/inside/smoke"

echo "An install prefix, and a torch without Python"
quietly "$cmake" -S . -B "$out/build" -DCMAKE_PREFIX_PATH="$torch" -DCMAKE_INSTALL_PREFIX="$out/prefix"
quietly "$cmake" --build "$out/build" -j "$jobs"
quietly "$cmake" --install "$out/build"
rm -rf "$out/build" "$out/inside"
(cd "$out/prefix" && find . -type f | sort)
quietly env -i PATH="$(getconf PATH)" "$cmake" -S tests/cpp/smoke -B "$out/outside" -DCMAKE_PREFIX_PATH="$out/prefix;$torch"
quietly env -i PATH="$(getconf PATH)" "$cmake" --build "$out/outside"
env -i "$out/outside/smoke"
