#!/usr/bin/env bash
# Builds the program of tests/cpp/smoke on the two ways that compile the library again, and runs it:
#
#   the sources as a folder of the program's project (add_subdirectory, FetchContent)
#   a prefix that the sources were installed to, and a torch, with no variable of the environment set
#
# The way from the package for Python is tested by tests/programs/test_cmake.py.
#
#   PYTHON=.venv/bin/python   has the torch
#   MAX_JOBS=2                compiles so many files at once
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
