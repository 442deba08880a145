#!/usr/bin/env bash
# Runs the tests of tests/clients with the real libraries, in an environment of their own.
# It lies in .venv-clients and is made when it is missing or requirements-clients.txt has changed.
#
#   BASE_PYTHON=python  makes it: by default python3
#   arguments           go to pytest
#
# Takes the extension that was built in the checkout if that fits, else builds one into .venv-clients.
set -euo pipefail
cd "$(dirname "$0")/.."

home=.venv-clients
python=$PWD/$home/bin/python
tests=$PWD/tests/clients
base=${BASE_PYTHON:-python3}
unset PYTHONPATH # the environment has what it needs
export PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1 AMP_EXT_REQUIRE_CLIENTS=1

digest_of() {
  find "$@" -type f -not -name '*.py[co]' -not -name '*.so' -print0 | LC_ALL=C sort -z |
    xargs -0 sha256sum | sha256sum
}

# Complete or not at all.
make_environment() {
  "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "test_clients.sh: Python 3.10 or newer is needed: BASE_PYTHON=python3.11 $0" >&2
    exit 1
  }
  echo "Installing the clients into $home, $("$base" --version) (once, about two minutes)"
  rm -rf "$home"
  trap 'rm -rf "$home"' EXIT
  "$base" -m venv "$home"
  "$python" -m pip install -qq -r requirements-clients.txt
  echo "$1" > "$home/.installed"
  trap - EXIT
}

fits() {
  PYTHONPATH=$PWD "$python" - << 'END'
import json, pathlib, sys
import torch, amp_ext

info = json.loads((pathlib.Path(amp_ext.__file__).parent / "_build_info.json").read_text())
assert info["torch"] == torch.__version__, info
amp_ext.ops.cpu_isa()
END
}

# The copy of the sources keeps its objects, and the checkout stays as it is.
build() {
  local digest source=$home/source
  digest=$(digest_of amp_ext csrc setup.py pyproject.toml)
  if [ "$(cat "$home/.built" 2> /dev/null)" = "$digest" ]; then
    return
  fi
  echo "Building the extension for $home (log: $home/build.log)"
  mkdir -p "$source"
  rm -rf "$source"/{amp_ext,csrc,build/lib*,build/bdist*}
  tar -c --exclude='*.so' --exclude=__pycache__ --exclude=_build_info.json \
    LICENSE MANIFEST.in README.md amp_ext csrc pyproject.toml setup.py | tar -x -C "$source"
  "$python" -m pip install -v --no-build-isolation --no-deps --force-reinstall --no-cache-dir \
    "./$source" > "$home/build.log" 2>&1 || {
    cat "$home/build.log" >&2
    exit 1
  }
  echo "$digest" > "$home/.built"
}

wanted=$(digest_of requirements.txt requirements-clients.txt)
[ "$(cat "$home/.installed" 2> /dev/null)" = "$wanted" ] || make_environment "$wanted"
if fits 2> /dev/null; then
  export PYTHONPATH=$PWD
else
  build
fi
cd "$home" # so that the checkout does not hide what is installed
exec "$python" -m pytest "$tests" -p no:cacheprovider "$@"
