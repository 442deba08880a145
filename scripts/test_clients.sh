#!/usr/bin/env bash
# Runs the tests of tests/clients with the real libraries, in the environment .venv-clients. Creates the
# environment if it is missing or requirements-clients.txt has changed.
#
#   BASE_PYTHON=python  Python that creates the environment (python3)
#   arguments           are passed to pytest
#
# Uses the extension built in the checkout if it fits the environment's PyTorch, and otherwise builds one
# into .venv-clients.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/own_environment.sh

tests=$PWD/tests/clients
export HF_HUB_OFFLINE=1 AMP_EXT_REQUIRE_CLIENTS=1

make_environment .venv-clients requirements-clients.txt
provide_extension
cd "$home" # leaves the checkout, which would hide the installed package
exec "$python" -m pytest "$tests" -p no:cacheprovider "$@"
