"""The command line that shows how amp_ext is installed and whether it works.

python -m amp_ext.info            # versions, build, processor, GPUs, and problems
python -m amp_ext.info --check    # also compares a few real steps on each device with torch's
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from amp_ext import ops
from amp_ext.info import facts
from amp_ext.info.causes import Cause, recognise
from amp_ext.info.check import DTYPES, check, check_division


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints facts about the installation and its problems; returns 1 if there is a problem."""
    options = _parser().parse_args(arguments)
    for label, text in facts.describe():
        _print_fact(label, text)
    error = _error_of_loading()
    problems = [error] if error else _unused_gpu()
    if options.check and not error:
        problems += _take_steps()
    if not problems:
        loads = "It loads; --check takes real steps on each device."
        print(f"\n{'It works.' if options.check else loads}")
        return 0
    found: dict[Cause, str] = {}
    for problem in problems:
        found.setdefault(recognise(problem), problem)
    for cause, problem in found.items():
        print(f"\nProblem: {problem}")
        if cause.text:
            print(f"Cause: {cause.text}")
    print("\nType this:\n")
    capabilities = sorted({capability for _, capability in facts.gpus()})
    for line in dict.fromkeys(cause.line(capabilities) for cause in found):
        print(f"    {line}")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m amp_ext.info",
        description="Says what this amp_ext is, whether it works, and what to type if not.",
        epilog="The exit code is 0 if all is well and 1 if something does not work.",
    )
    parser.add_argument("--check", action="store_true", help="takes real steps on each device")
    return parser


def _print_fact(label: str, text: str) -> None:
    print(f"{label:<18}{text}")


def _error_of_loading() -> str:
    """Returns why the compiled module does not load, or an empty string if it loads."""
    try:
        ops.cpu_isa()
    except (ImportError, RuntimeError) as error:
        # Cuts off the advice in the error, because recognise() finds more exact advice.
        return str(error).splitlines()[0].partition(" Rebuild: ")[0].partition(" Build it: ")[0]
    return ""


def _unused_gpu() -> list[str]:
    build, gpus = facts.read_build(), facts.gpus()
    if build is None or "cuda" in build["backends"] or not gpus:
        return []
    gpu = "GPU 0 ({}, compute capability {})".format(*gpus[0])
    return [f"amp_ext was built without CUDA, and there is {gpu}"]


def _take_steps() -> list[str]:
    """Takes real steps on each device, prints whether they work, and returns the problems."""
    problems = []
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for device in (torch.device("cpu"), *gpus):
        told = []
        for dtype in DTYPES:
            name, error = str(dtype).removeprefix("torch."), check(device, dtype)
            told.append(f"{name} {'fails' if error else 'works'}")
            if error:
                problems.append(f"steps on {device} in {name}: {error}")
        _print_fact(f"steps on {device}", ", ".join(told))
        works = not any("fails" in each for each in told)
        error = check_division(device) if works and device.type == "cuda" else None
        if error:
            problems.append(f"division on {device}: {error}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
