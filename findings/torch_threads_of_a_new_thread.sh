#!/usr/bin/env bash
# torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# torch.set_num_threads() is meant to set the number of OpenMP threads of the calling thread. What a
# new thread has set for itself is lost if another thread sets its own number before the new one has
# asked for its number once, or has run an operation: at that first time torch sets the number of the
# thread to the one that was set last, by whichever thread. A worker that limits itself to one thread
# in its initializer, while the main thread restores its own number, runs with all threads. If the
# worker calls torch.get_num_threads() before it sets the number, the number stays.
#
# Seen:
#   worker sets 1, main sets 4: worker has 4, main 4
#   worker asks and sets 1, main sets 4: worker has 1, main 4
# Exits with 1 if this has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from concurrent.futures import ThreadPoolExecutor

import torch


def numbers(asks_first):
    def limit():
        if asks_first:
            torch.get_num_threads()
        torch.set_num_threads(1)

    with ThreadPoolExecutor(1, initializer=limit) as worker:
        worker.submit(int).result()
        torch.set_num_threads(4)
        return worker.submit(torch.get_num_threads).result(), torch.get_num_threads()


plain, asked = numbers(asks_first=False), numbers(asks_first=True)
print(f"worker sets 1, main sets 4: worker has {plain[0]}, main {plain[1]}")
print(f"worker asks and sets 1, main sets 4: worker has {asked[0]}, main {asked[1]}")
sys.exit((plain, asked) != ((4, 4), (1, 4)))
PYTHON
