#!/usr/bin/env bash
# Sourced by the scripts that need other packages than `make` installs: an environment of their own.
#
#   copy_sources FOLDER what a wheel is built from: the source distribution, unpacked
#   make_environment .venv-NAME requirements-NAME.txt   when it is missing or the file has changed;
#                       installs with $BASE_PYTHON, by default python3
#   provide_extension   takes the extension that was built in the checkout if it fits the environment,
#                       else builds one into it
#
# The first sets $home and $python, the second PYTHONPATH where it is needed.

unset PYTHONPATH # the environment has what it needs
export PIP_DISABLE_PIP_VERSION_CHECK=1

digest_of() {
  find "$@" -type f -not -name '*.py[co]' -not -name '*.so' -print0 | LC_ALL=C sort -z |
    xargs -0 sha256sum | sha256sum
}

# Complete or not at all.
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

# Clean, for a wheel takes along whatever lies in build/lib. Objects are kept.
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

# As a user would: with pip, into site-packages. The checkout stays as it is.
install_copy() {
  "$python" -m pip install -v --no-build-isolation --no-deps --force-reinstall --no-cache-dir \
    "./$home/source" > "$home/build.log" 2>&1 || {
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
