"""Every kernel on a device and on the CPU, of which `harness/engine_results.py` has the cases.

    python tests/gpu_cases.py                      # on the GPU
    compute-sanitizer python tests/gpu_cases.py    # with every access checked

Inputs are made on the CPU and copied, so that few kernels but ours run: a sanitizer that is told of
every allocation (PYTORCH_NO_CUDA_MEMORY_CACHING=1) finds our faults, in a minute.
"""

from __future__ import annotations

import argparse
import sys

import torch
from harness.engine_results import cases, results_of, trainings
from harness.gradient_lists import equal

# A sanitizer has a minute: of the cases of steps it gets every third.
EACH = 3


def main() -> int:
    """Runs the cases and returns 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", type=torch.device, default="cuda")
    device = parser.parse_args().device
    differ = 0
    chosen = [(n, c) for i, (n, c) in enumerate(cases()) if "options" not in n or i % EACH == 0]
    chosen += trainings()
    for name, case in chosen:
        expected = results_of(name, case, torch.device("cpu"))
        found = results_of(name, case, device)
        different = [key for key in expected if not equal(found[key], expected[key])]
        differ += bool(different)
        print(f"{name}: {', '.join(different) + ' differ' if different else 'the same bits'}")
    print(f"{len(chosen) - differ} of {len(chosen)} cases have the bits of the CPU")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
