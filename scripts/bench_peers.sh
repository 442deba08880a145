#!/usr/bin/env bash
# Times amp_ext's AdamW beside those of other packages, in an environment that has them.
# It lies in .venv-peers and is made when it is missing or requirements-peers.txt has changed.
#
#   BASE_PYTHON=python  makes it: by default python3
#   RESULTS=folder      takes figures, table and picture: by default results/peers
#   TEST=1              runs the tests of the benchmark there instead
#   arguments           go to benchmarks/peers.py, or to pytest
#
# Takes the extension that was built in the checkout if that fits, else builds one into .venv-peers.
# DeepSpeed builds its own there when it is first used, and torchao compiles for each shape.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/own_environment.sh

results=${RESULTS:-results/peers}
tests=$PWD/tests/programs/test_bench
program=$PWD/benchmarks/peers.py
export DS_BUILD_OPS=0 # DeepSpeed's are built at first use
make_environment .venv-peers requirements-peers.txt
provide_extension
export PATH=$PWD/$home/bin:$PATH # ninja
export TORCH_EXTENSIONS_DIR=$PWD/$home/extensions TORCHINDUCTOR_CACHE_DIR=$PWD/$home/inductor
if [ -n "${TEST:-}" ]; then
  export AMP_EXT_REQUIRE_PEERS=1
  cd "$home"
  exec "$python" -m pytest "$tests"{,_peers}.py -p no:cacheprovider "$@"
fi
if [ -z "${PYTHONPATH:-}" ]; then # so that the checkout does not hide what is installed
  results=$(realpath -m "$results")
  cd "$home"
fi
exec "$python" "$program" --out "$results" "$@"
