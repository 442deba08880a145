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
source scripts/own_environment.sh

tests=$PWD/tests/clients
export HF_HUB_OFFLINE=1 AMP_EXT_REQUIRE_CLIENTS=1

make_environment .venv-clients requirements-clients.txt
provide_extension
cd "$home" # so that the checkout does not hide what is installed
exec "$python" -m pytest "$tests" -p no:cacheprovider "$@"
