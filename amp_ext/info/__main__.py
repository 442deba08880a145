"""The command line of the information.

python -m amp_ext.info            # versions, build, processor, GPUs, and what is wrong
python -m amp_ext.info --check    # and a few real steps on each device, beside torch's
python -m amp_ext.info --json     # the same for programs
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from amp_ext import ops
from amp_ext.info import facts
from amp_ext.info.causes import CAUSES, UNKNOWN, recognise
from amp_ext.info.check import DTYPES, check
from amp_ext.program import run_program


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what amp_ext is and what is wrong with it.

    Args:
        arguments: Those of the command line, or None for the process's own.

    Returns:
        The exit code: 0 if all is well, 1 if something does not work.
    """
    options = _parser().parse_args(arguments)
    found = examine(take_steps=options.check)
    if options.json:
        print(json.dumps(found, indent=2))
        return 0 if found["ok"] else 1
    for label, text in [*_facts(found), *_steps(found["check"])]:
        print(f"{label:<18}{text}")
    if found["ok"]:
        loads = "It loads; --check takes real steps on each device."
        print(f"\n{'It works.' if options.check else loads}")
        return 0
    texts = {cause.key: cause.text for cause in (*CAUSES, UNKNOWN)}
    for problem in found["problems"]:
        print(f"\nProblem: {problem['message']}\nCause: {texts[problem['cause']]}")
    print("\nType this:\n")
    for line in dict.fromkeys(problem["cure"] for problem in found["problems"]):
        print(f"    {line}")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m amp_ext.info",
        description="Says what this amp_ext is, whether it works, and what to type if not.",
        epilog="The exit code is 0 if all is well and 1 if something does not work.",
    )
    parser.add_argument("--check", action="store_true", help="takes real steps on each device")
    parser.add_argument("--json", action="store_true", help="prints JSON")
    return parser


def examine(*, take_steps: bool) -> dict[str, Any]:
    """Finds out what amp_ext is and what is wrong with it.

    Args:
        take_steps: Takes a few real steps on each device, if the compiled module loads.

    Returns:
        The facts, and ``check``: a device, a dtype and the error or None for each row of steps;
        ``problems``: for each cause its key, the message, and the line that cures it; ``ok``.
    """
    found = facts.describe()
    loads = found["cpu"]["instructions"] is not None
    found["check"] = _take_steps(len(found["gpus"])) if take_steps and loads else []
    capabilities = sorted({gpu["capability"] for gpu in found["gpus"]})
    problems: dict[str, dict[str, str]] = {}
    for message in _messages(found):
        cause = recognise(message)
        problem = {"cause": cause.key, "message": message, "cure": cause.line(capabilities)}
        problems.setdefault(cause.key, problem)
    return {**found, "problems": list(problems.values()), "ok": not problems}


def _take_steps(gpus: int) -> list[dict[str, Any]]:
    devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(gpus))]
    return [
        {
            "device": str(device),
            "dtype": str(dtype).removeprefix("torch."),
            "error": check(device, dtype),
        }
        for device in devices
        for dtype in DTYPES
    ]


def _messages(found: dict[str, Any]) -> Iterator[str]:
    """Yields what is wrong, in words."""
    try:
        ops.cpu_isa()
    except (ImportError, RuntimeError) as error:
        # The line to type follows from the cause and is more exact than the error's.
        yield str(error).splitlines()[0].partition(" Rebuild: ")[0].partition(" Build it: ")[0]
        return
    build = found["build"]
    for index, gpu in enumerate(found["gpus"]):
        if build is not None and "cuda" not in build["backends"]:
            name = f"GPU {index} ({gpu['name']}, compute capability {gpu['capability']})"
            yield f"amp_ext was built without CUDA, and there is {name}"
    for step in found["check"]:
        if step["error"]:
            yield f"steps on {step['device']} in {step['dtype']}: {step['error']}"


def _facts(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    versions, build, cpu = found["versions"], found["build"], found["cpu"]
    yield "amp_ext", f"{versions['amp_ext']} in {found['folder']}"
    yield "torch", f"{versions['torch']}, {_with_cuda(versions['cuda'])}"
    yield "Python", versions["python"]
    yield "library", found["library"] or "none that programs in C++ could link"
    if build is None:
        yield "build", "unknown: no _build_info.json lies beside the compiled module"
    else:
        built_for = f"for torch {build['torch']}, {_with_cuda(build['cuda'])}"
        toolkit = f", CUDA toolkit {build['toolkit']}" if build["toolkit"] else ""
        changes = ", with uncommitted changes" if build["uncommitted_changes"] else ""
        yield "build", f"{built_for}, Python {build['python']}"
        yield "compiler", f"{build['compiler'] or 'unknown'}{toolkit}"
        yield "commit", f"{build['commit'] or 'unknown'}{changes}"
        yield "backends", ", ".join([*build["backends"], *build["architectures"]])
    variable = "not set" if cpu["variable"] is None else cpu["variable"]
    instructions = f"{cpu['instructions'] or 'unknown'} ({facts.ISA_VARIABLE} {variable})"
    yield "CPU", f"{instructions}, threads: {cpu['threads']}, cores: {cpu['cores']}"
    for index, gpu in enumerate(found["gpus"]):
        yield f"GPU {index}", f"{gpu['name']}, compute capability {gpu['capability']}"
    if not found["gpus"]:
        yield "GPU", "none that torch sees"


def _with_cuda(version: str | None) -> str:
    return f"CUDA {version}" if version else "without CUDA"


def _steps(steps: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for device in dict.fromkeys(step["device"] for step in steps):
        of_device = [step for step in steps if step["device"] == device]
        told = (f"{step['dtype']} {'fails' if step['error'] else 'works'}" for step in of_device)
        yield f"steps on {device}", ", ".join(told)


if __name__ == "__main__":
    sys.exit(run_program(main))
