#!/usr/bin/env bash
# Shows that a GPU build needs no CUDA toolkit: creates an empty environment, hides the toolkit of this
# machine, and installs amp_ext there as docs/install.md says. Without a compiler the build must stop with the
# three lines that tell how to get one; with the compiler from pip it must build the kernels and load.
# Downloads several GB.
#
#   TORCH=2.15.0             version of PyTorch, one for CUDA 13
#   BASE_PYTHON=python3      Python that creates the environment
#   TORCH_CUDA_ARCH_LIST=9.0 GPU architectures to build for
#   FOLDER=build/pip_compiler    where the environment and the copy of the sources are, both of them new
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(realpath -m "${FOLDER:-build/pip_compiler}")
rm -rf "$folder"
mkdir -p "$folder/empty"
"${BASE_PYTHON:-python3}" -m venv "$folder/env"
python=$folder/env/bin/python

# Runs a command without the toolkit: a mount hides the usual folder, for which Linux wants root.
without_toolkit() {
  # shellcheck disable=SC2016
  local hide='test ! -e /usr/local/cuda || mount --bind "$1" "$(realpath /usr/local/cuda)"; shift; exec "$@"'
  unshare -m bash -c "$hide" _ "$folder/empty" env -u CUDA_HOME -u CUDA_PATH -u AMP_EXT_CUDA \
    PATH=/usr/bin:/bin TORCH_CUDA_ARCH_LIST="${TORCH_CUDA_ARCH_LIST:-9.0}" "$@"
}
if without_toolkit which nvcc; then
  echo "pip_compiler.sh: this nvcc can't be hidden" >&2
  exit 1
fi

"$python" -m pip install -qq --no-cache-dir "torch==${TORCH:-2.15.0}"
"$python" -m pip install -qq "setuptools>=77,<82" ninja wheel
mkdir "$folder/source"
git ls-files -z | tar -c --null -T - | tar -x -C "$folder/source"
install=("$python" -m pip install --no-build-isolation "$folder/source")

if without_toolkit "${install[@]}" > "$folder/stopped.log" 2>&1; then
  echo "pip_compiler.sh: the build without a compiler did not stop" >&2
  exit 1
fi
grep -A 2 'amp_ext: PyTorch' "$folder/stopped.log"
compiler=$(sed -n "s/^.*To install nvcc: pip install '\(.*\)'$/\1/p" "$folder/stopped.log" | head -1)

"$python" -m pip install -qq --no-cache-dir "$compiler"
SECONDS=0
without_toolkit "${install[@]}" > "$folder/build.log" 2>&1 || {
  cat "$folder/build.log" >&2
  exit 1
}
echo "built in $SECONDS s with $compiler"
cd "$folder"
without_toolkit "$python" -W ignore -m amp_ext.info --check | tee info.log
grep -q '^backends  *cpu, cuda, ' info.log
