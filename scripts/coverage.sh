#!/usr/bin/env bash
# Runs the tests and prints their coverage: lines and branches of Python, lines of C++.
#
# Builds a copy of the tree in build/coverage with gcc's counters: amp_ext._C and the emulated kernels.
# Processes that tests start are counted, too. A line of C++ is covered if any of its template
# instances is. Arguments are passed to pytest. The tables are also written to build/coverage/table.txt.
# Needs the packages coverage and gcovr.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
python=$(realpath --no-symlinks "$(command -v "${PYTHON:-.venv/bin/python}")")
copy=$root/build/coverage

mkdir -p "$copy/build/bin"
find "$copy" -mindepth 1 -maxdepth 1 ! -name build -exec rm -rf {} +
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
  [ ! -f "$file" ] || cp --parents --preserve=mode,timestamps "$file" "$copy"
done
# Compiles with -O1, because higher optimization removes some lines.
printf '#!/bin/sh\nexec g++ "$@" --coverage -O1\n' > "$copy/build/bin/g++"
chmod +x "$copy/build/bin/g++"
export CXX=$copy/build/bin/g++ PYTHONPATH=$copy
cd "$copy"
find build \( -name '*.gcda' -o -name '.coverage*' \) -delete

echo "Building the modules"
"$python" setup.py build_ext --inplace > build/build.log 2>&1 || { cat build/build.log; exit 1; }
"$python" tests/cuda_emulator/build.py emulated > build/emulated.log

cat > build/coveragerc << 'END'
[run]
branch = True
parallel = True
patch = subprocess
source = amp_ext
data_file = ${COVERAGE_FOLDER}/.coverage
disable_warnings = no-data-collected, module-not-measured, couldnt-parse
[report]
exclude_also =
    if TYPE_CHECKING:
END
export COVERAGE_FOLDER=$copy/build
failed=0
"$python" -m coverage run --rcfile build/coveragerc -m pytest -q -p no:cacheprovider "$@" || failed=$?
"$python" -m coverage combine -q --rcfile build/coveragerc

{
  "$python" -m coverage report --rcfile build/coveragerc || true
  "$python" -m gcovr --filter csrc/ --filter amp_ext/ --merge-lines --gcov-ignore-parse-errors=all build
} | tee table.txt
exit "$failed"
