#!/usr/bin/env bash
# Times amp_ext's AdamW against those of other packages, in the environment .venv-peers that has them.
# Creates the environment if it is missing or requirements-peers.txt has changed.
#
#   BASE_PYTHON=python  Python that creates the environment (python3)
#   RESULTS=folder      folder for figures, table and picture (results/peers)
#   TEST=1              runs the tests of the benchmark instead
#   arguments           are passed to benchmarks/peers.py, or to pytest
#
# Uses the extension built in the checkout if it fits the environment's PyTorch, and otherwise builds one
# into .venv-peers. DeepSpeed builds its extension there at first use, and torchao compiles for each shape.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/own_environment.sh

results=${RESULTS:-results/peers}
tests=$PWD/tests/programs/test_bench
program=$PWD/benchmarks/peers.py
export DS_BUILD_OPS=0 # DeepSpeed's operations are built at first use, not at installation
make_environment .venv-peers requirements-peers.txt
provide_extension
export PATH=$PWD/$home/bin:$PATH # for ninja
export TORCH_EXTENSIONS_DIR=$PWD/$home/extensions TORCHINDUCTOR_CACHE_DIR=$PWD/$home/inductor
if [ -n "${TEST:-}" ]; then
  export AMP_EXT_REQUIRE_PEERS=1
  cd "$home"
  exec "$python" -m pytest "$tests"{,_peers}.py -p no:cacheprovider "$@"
fi
if [ -z "${PYTHONPATH:-}" ]; then # leaves the checkout, which would hide the installed package
  results=$(realpath -m "$results")
  cd "$home"
fi
exec "$python" "$program" --out "$results" "$@"
