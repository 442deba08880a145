"""Mutation testing: puts faults into the code, one at a time, and shows which ones tests detect.

    python scripts/mutants.py             # resumes an interrupted run, and prints a summary
    python scripts/mutants.py --only 3,103

Each fault in `mutants.json` has the path of a file; consecutive lines, without indentation, that
occur in the file exactly once; a text in the last of these lines and its replacement; and the test
files that should detect the fault. Faults are numbered from 1.

Faults are put into copies of the code in build/mutants, which take minutes to build. All C++ faults
are compiled into one binary, and AMP_EXT_MUTANT selects one of them. If the old text ends with ";",
the fault replaces a statement, otherwise an expression. The test files of a fault run first and, if
they pass, all tests. A test that hangs counts as having detected it.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import queue
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "mutants"
RESULTS = FOLDER / "results.json"
HANG = 180  # seconds per test; long, because a test may compile on a busy machine
BUDGET = 400  # seconds for the test files of a fault, and the same again for all tests

HEADER = """// Which fault is switched on; put before every source of the copy.
#pragma once
#include <cstdlib>
inline const int amp_ext_mutant = [] {
  const char* const text = std::getenv("AMP_EXT_MUTANT");
  return text == nullptr ? 0 : std::atoi(text);
}();
"""

Fault = dict[str, Any]


def read_faults() -> dict[int, Fault]:
    """Returns the faults by number, and adds the result of :func:`begin_of` to each as "begin"."""
    faults = json.loads(Path(__file__).with_suffix(".json").read_text())
    for fault in faults:
        fault["begin"] = begin_of(fault, (ROOT / fault["file"]).read_text())
    return dict(enumerate(faults, 1))


def begin_of(fault: Fault, text: str) -> int | None:
    """Returns the offset of the old text in its file, or None if it isn't found exactly once."""
    lines, wanted = text.splitlines(keepends=True), fault["lines"]
    bare = [line.strip() for line in lines]
    ends = [i for i in range(len(wanted), len(bare) + 1) if bare[i - len(wanted) : i] == wanted]
    if len(ends) != 1:
        return None
    last = ends[0] - 1
    column = fault.get("column", wanted[-1].find(fault["old"]))
    begin = sum(map(len, lines[:last])) + lines[last].index(wanted[-1]) + column
    return begin if text.startswith(fault["old"], begin) else None


def is_python(fault: Fault) -> bool:
    return fault["file"].endswith(".py")


def with_fault(text: str, fault: Fault, new: str) -> str:
    return text[: fault["begin"]] + new + text[fault["begin"] + len(fault["old"]) :]


def with_switches(text: str, faults: list[tuple[int, Fault]]) -> str:
    """Returns a C++ source with all ``faults``; AMP_EXT_MUTANT selects one at run time."""
    for number, fault in sorted(faults, key=lambda pair: -pair[1]["begin"]):
        chosen, old, new = f"amp_ext_mutant == {number}", fault["old"], fault["new"]
        switch = f"({chosen} ? ({new}) : ({old}))"
        if old.endswith(";"):
            switch = f"if ({chosen}) {{ {new} }} else {{ {old} }}"
        text = with_fault(text, fault, switch)
    return text


# Copies of the code.


def tree(job: int) -> Path:
    return FOLDER / f"tree{job}"


def environment(job: int, number: int = 0) -> dict[str, str]:
    """Returns the environment variables to build and test a copy, with fault ``number`` active."""
    return os.environ | {
        "AMP_EXT_MUTANT": str(number),
        "CXX": str(FOLDER / "bin" / "g++"),
        "PYTHONPATH": f"{tree(job)}:{os.environ.get('PYTHONPATH', '')}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
    }


def write_if_changed(file: Path, content: bytes) -> None:
    """Writes a file only if its content differs, so that unchanged sources are not rebuilt."""
    if not file.exists() or file.read_bytes() != content:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def copy_tree(target: Path) -> None:
    """Copies all files that git doesn't ignore, and adds the switches to the C++ sources."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True).split("\0")
    names = {name for name in listed if name and (ROOT / name).is_file()}
    for folder in ("csrc", "amp_ext", "tests"):
        for old in (target / folder).rglob("*.[chp]*"):
            is_source = old.suffix in (".h", ".cuh", ".cpp", ".cu", ".py")
            if is_source and str(old.relative_to(target)) not in names:
                old.unlink()
    faults: dict[str, list[tuple[int, Fault]]] = collections.defaultdict(list)
    for number, fault in read_faults().items():
        if not is_python(fault) and fault["begin"] is not None:
            faults[fault["file"]].append((number, fault))
    for name in sorted(names):
        content = (ROOT / name).read_bytes()
        if name in faults:
            content = with_switches(content.decode(), faults[name]).encode()
        write_if_changed(target / name, content)
        shutil.copymode(ROOT / name, target / name)


def prepare(jobs: int) -> None:
    """Makes a copy of the code for each job; builds the binaries in the first and copies them."""
    write_if_changed(FOLDER / "mutant.h", HEADER.encode())
    compiler = FOLDER / "bin" / "g++"
    write_if_changed(compiler, f'#!/bin/sh\nexec g++ -include "{FOLDER}/mutant.h" "$@"\n'.encode())
    compiler.chmod(0o755)
    build = [sys.executable, "setup.py", "build_ext", "--inplace"]
    emulator = [sys.executable, "tests/cuda_emulator/build.py", "emulated"]
    with (FOLDER / "build.log").open("w") as log:
        for job in range(jobs):
            copy_tree(tree(job))
            if job == 0:
                subprocess.run(
                    build, cwd=tree(0), env=environment(0), stdout=log, stderr=log, check=True
                )
            # Matches the module, the library, and the files that describe the build.
            for pattern in ("_[Cb]*.[sj]*", "lib/*.so", "share/cmake/amp_ext/amp_extBuild.cmake"):
                for file in (tree(0) / "amp_ext").glob(pattern):
                    write_if_changed(tree(job) / file.relative_to(tree(0)), file.read_bytes())
            subprocess.run(emulator, cwd=tree(job), env=environment(job), stdout=log, check=True)
            print(f"{tree(job)} is built")


def files_named(tests: str) -> list[str]:
    """Returns the paths of test files; "adam sgd" stands for test_adam.py and test_sgd.py."""
    found = ((ROOT / "tests").rglob(f"test_{name}.py") for name in tests.split())
    return [str(file.relative_to(ROOT)) for files in found for file in files]


def run_tests(number: int, fault: Fault, job: int) -> dict[str, str]:
    """Runs the tests of a fault in the copy of a job; returns whether they detected it."""
    log = FOLDER / f"tests{job}.log"
    command = ["timeout", "--kill-after=5", str(BUDGET), sys.executable, "-m", "pytest"]
    command += ["-qx", "-rfE", "-p", "no:cacheprovider", "-o", f"faulthandler_timeout={HANG}"]
    command += ["-o", "faulthandler_exit_on_timeout=true"]
    is_whole = True
    for stage in (files_named(fault["tests"]), ["tests"]):
        with log.open("w") as output:
            code = subprocess.run(
                [*command, *stage],
                cwd=tree(job),
                env=environment(job, number),
                stdout=output,
                stderr=output,
                check=False,
            ).returncode
        if code in (0, 5):  # 0: all tests passed, 5: no test was collected
            continue
        if code in (124, 137):  # `timeout` ended the run after BUDGET seconds
            is_whole = False
            continue
        text = log.read_text()
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
        how = "a hang" if "Timeout (" in text else f"exit code {code}"
        return {"result": "killed", "by": failed[0] if failed else how}
    return {"result": "survived" if is_whole else "survived, not all tests were run"}


def run_one(number: int, fault: Fault, job: int) -> dict[str, str]:
    """Puts a fault into the copy of a job, runs its tests, and removes the fault again."""
    if fault["begin"] is None:
        return {"result": "not found"}
    file = tree(job) / fault["file"]
    content = file.read_text()
    try:
        if is_python(fault):
            file.write_text(with_fault(content, fault, fault["new"]))
        return run_tests(number, fault, job)
    finally:
        write_if_changed(file, content.encode())


def run_all(only: str, jobs: int) -> None:
    """Tests the faults in ``only``, or all that have no result yet, and prints a summary."""
    faults = read_faults()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    wanted = [int(n) for n in only.split(",")] if only else faults
    waiting = [number for number in wanted if only or str(number) not in results]
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    for job in range(jobs):
        free.put(job)

    def work(number: int) -> tuple[int, dict[str, str]]:
        job = free.get()
        result = run_one(number, faults[number], job)
        free.put(job)
        return number, result

    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(work, number) for number in waiting]):
            number, result = done.result()
            results[str(number)] = result
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            print(number, *result.values(), flush=True)
    print(dict(collections.Counter(row["result"] for row in results.values())))
    for number, fault in faults.items():
        result = results.get(str(number), {"result": "not run"})["result"]
        if result != "killed":
            print(f"{number}: {result}\n    {fault['file']}: {fault['lines'][-1]}")
            print(f"    - {fault['old']}\n    + {fault['new']}")


def main() -> None:
    """Reads the command line, prepares the copies, and tests the faults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2, help="copies that are tested side by side")
    parser.add_argument("--only", default="", help="numbers of faults, separated by commas")
    options = parser.parse_args()
    prepare(options.jobs)
    run_all(options.only, options.jobs)


if __name__ == "__main__":
    main()
