#!/usr/bin/env bash
# Builds train.cpp with CMake, and trains it on the photograph of `make demo`.
#
#   examples/libtorch/demo.sh [--quick] [--image FILE] ...    (takes the options of photo.py)
#
# Environment: PYTHON (default: python). Writes results/photo/libtorch.png and libtorch.pt.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
build=build/libtorch
out=results/photo
if ! command -v cmake > /dev/null; then
  echo 'CMake is missing: pip install cmake, or apt-get install cmake' >&2
  exit 1
fi
mkdir -p "$build" "$out"

"$python" examples/photo.py "$@" --write-start "$build/start.pt"

echo "Building the program (log: $build/build.log)"
folder=$("$python" -m amp_ext.cmake)
build_program() {
  rm -f "$build/CMakeCache.txt"  # may contain the paths of another torch
  cmake -S examples/libtorch -B "$build" -DCMAKE_BUILD_TYPE=Release -Damp_ext_DIR="$folder" &&
    cmake --build "$build"
}
build_program > "$build/build.log" 2>&1 || { cat "$build/build.log"; exit 1; }

"$build/train" "$build/start.pt" --checkpoint "$out/libtorch.pt" --picture "$out/libtorch.ppm"

"$python" - "$out/libtorch.ppm" "$out/libtorch.png" << 'END'
import sys
from PIL import Image

with Image.open(sys.argv[1]) as picture:
    picture.resize((1024, 1024), Image.Resampling.NEAREST).save(sys.argv[2])
END
echo "Written: $out/libtorch.png, $out/libtorch.pt"
