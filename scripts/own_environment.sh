#!/usr/bin/env bash
# Functions for scripts that need an environment of their own, with packages that `make` doesn't install.
#
#   copy_sources FOLDER builds the source distribution and unpacks it into FOLDER
#   make_environment .venv-NAME requirements-NAME.txt   creates the environment with $BASE_PYTHON
#                       (python3) if it is missing or the file has changed; sets $home and $python
#   make_torch_environment VERSION   creates .venv-torch/VERSION (several GB) with that PyTorch, if it is
#                       missing, with $BASE_PYTHON (python3.12 if found, else python3); sets both, too
#   set_toolkit         tells CMake where the CUDA toolkit is; fails if CMake can't use the PyTorch of $python
#                       because there is none
#   provide_extension   uses the extension built in the checkout if it fits the environment's PyTorch,
#                       and sets PYTHONPATH to it; otherwise builds one into the environment

unset PYTHONPATH # the environment has all packages that are needed
export PIP_DISABLE_PIP_VERSION_CHECK=1

digest_of() {
  find "$@" -type f -not -name '*.py[co]' -not -name '*.so' -print0 | LC_ALL=C sort -z |
    xargs -0 sha256sum | sha256sum
}

# Creates a complete environment, or none if the installation fails.
make_environment() {
  local base=${BASE_PYTHON:-python3} wanted
  home=$1
  python=$PWD/$home/bin/python
  wanted=$(digest_of requirements.txt "$2")
  if [ "$(cat "$home/.installed" 2> /dev/null)" = "$wanted" ]; then
    return
  fi
  "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "${0##*/}: Python 3.10 or newer is needed: BASE_PYTHON=python3.11 $0" >&2
    exit 1
  }
  echo "Installing $2 into $home, $("$base" --version) (once, about two minutes)"
  rm -rf "$home"
  trap 'rm -rf "$home"' EXIT
  "$base" -m venv "$home"
  "$python" -m pip install -qq -r "$2"
  echo "$wanted" > "$home/.installed"
  trap - EXIT
}

_find_python() {
  local candidate candidates
  candidates=(python3.12 "$(pyenv prefix "$(pyenv latest 3.12)" 2> /dev/null)/bin/python3" python3)
  [ -z "${BASE_PYTHON:-}" ] || candidates=("$BASE_PYTHON")
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2> /dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "${0##*/}: Python 3.10 or newer is needed: BASE_PYTHON=python3.12" >&2
  exit 1
}

_requirements() {
  grep -E '^(hypothesis|ninja|numpy|nvidia-cuda-nvdisasm|pytest|pytest-xdist|wheel)==' requirements.txt
}

# Creates a complete environment, or none if the installation fails. Caches no wheels, to save space.
make_torch_environment() {
  local base
  home=.venv-torch/$1
  python=$PWD/$home/bin/python
  if [ "$(cat "$home/.installed" 2> /dev/null)" = "$(_requirements)" ]; then
    return
  fi
  base=$(_find_python)
  echo "Installing PyTorch $1 into $home, $("$base" --version) (once, several GB)"
  rm -rf "$home"
  trap 'rm -rf "$home"' EXIT
  mkdir -p "$home/tmp"
  "$base" -m venv "$home"
  _requirements > "$home/tmp/requirements.txt"
  TMPDIR=$PWD/$home/tmp "$python" -m pip install -qq --no-cache-dir \
    "torch==$1" 'setuptools>=77,<82' -r "$home/tmp/requirements.txt"
  mv "$home/tmp/requirements.txt" "$home/.installed"
  rm -rf "$home/tmp"
  trap - EXIT
}

# The CMake files of a PyTorch with CUDA look for a toolkit, also if amp_ext was built for the CPU alone. nvcc
# on the PATH may be a wrapper, which knows where the toolkit is.
set_toolkit() {
  local toolkit
  toolkit=$(nvcc --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p') || true
  if [ -z "$toolkit" ]; then
    "$python" -W ignore -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'
    return
  fi
  toolkit=$(realpath "$toolkit")
  export CUDACXX=$toolkit/bin/nvcc CUDAToolkit_ROOT=$toolkit CUDA_PATH=$toolkit
}

# Removes old files first, because a wheel includes everything in build/lib. Keeps compiled objects.
copy_sources() {
  mkdir -p "$1"
  rm -rf "$1"/{amp_ext,csrc,sdist,build/lib*,build/bdist*}
  "$python" -c 'import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])' \
    "$1/sdist" > "$1/sdist.log" 2>&1 || {
    cat "$1/sdist.log" >&2
    exit 1
  }
  tar -xzf "$1"/sdist/*.tar.gz --strip-components=1 -C "$1"
}

# Installs $home/source or $1 with pip into site-packages, as a user would. The checkout is unchanged.
install_copy() {
  "$python" -m pip install -v --no-build-isolation --no-deps --force-reinstall --no-cache-dir \
    "./${1:-$home/source}" > "$home/build.log" 2>&1 || {
    cat "$home/build.log" >&2
    exit 1
  }
}

provide_extension() {
  if _fits 2> /dev/null; then
    export PYTHONPATH=$PWD
  else
    _build
  fi
}

_fits() {
  PYTHONPATH=$PWD "$python" - << 'END'
import json, pathlib, sys
import torch, amp_ext

info = json.loads((pathlib.Path(amp_ext.__file__).parent / "_build_info.json").read_text())
assert info["torch"] == torch.__version__, info
amp_ext.ops.cpu_isa()
END
}

_build() {
  local digest
  digest=$(digest_of amp_ext csrc setup.py pyproject.toml)
  if [ "$(cat "$home/.built" 2> /dev/null)" = "$digest" ]; then
    return
  fi
  echo "Building the extension for $home (log: $home/build.log)"
  copy_sources "$home/source"
  install_copy
  echo "$digest" > "$home/.built"
}
