"""Puts faults into copies of the code, one at a time, and shows which of them the tests notice.

    python scripts/mutants.py             # goes on where it was interrupted, and sums up
    python scripts/mutants.py --only 3,106

`mutants.json` has the faults: lines that stand in a file just once, without their indentation, what
becomes wrong in the last of them, and files of tests that are to notice it. Their numbers are their
places in the list, from 1.

The copies are made in build/mutants, which takes minutes. All faults in C++ are compiled into one
binary, where the environment variable AMP_EXT_MUTANT chooses one; a text that ends like a statement
replaces a statement, any other an expression. First run the files of tests that a fault names;
then, if none has failed, all tests. A test that hangs has noticed the fault.
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
HANG = 180  # seconds for one test: it may compile something, on a busy machine
BUDGET = 400  # seconds for each half of the tests of a fault

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
    """Returns the faults by their numbers, each with where it begins in its file, or None."""
    faults = json.loads(Path(__file__).with_suffix(".json").read_text())
    for fault in faults:
        fault["begin"] = begin_of(fault, (ROOT / fault["file"]).read_text())
    return dict(enumerate(faults, 1))


def begin_of(fault: Fault, text: str) -> int | None:
    """Returns where the faulty text begins, if its lines are there just once."""
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
    """Returns a C++ source in which the environment variable chooses between right and wrong."""
    for number, fault in sorted(faults, key=lambda pair: -pair[1]["begin"]):
        chosen, old, new = f"amp_ext_mutant == {number}", fault["old"], fault["new"]
        switch = f"({chosen} ? ({new}) : ({old}))"
        if old.endswith(";"):
            switch = f"if ({chosen}) {{ {new} }} else {{ {old} }}"
        text = with_fault(text, fault, switch)
    return text


# The copies.


def tree(job: int) -> Path:
    return FOLDER / f"tree{job}"


def environment(job: int, number: int = 0) -> dict[str, str]:
    """Returns the variables under which a copy is built and tested."""
    return os.environ | {
        "AMP_EXT_MUTANT": str(number),
        "CXX": str(FOLDER / "bin" / "g++"),
        "PYTHONPATH": f"{tree(job)}:{os.environ.get('PYTHONPATH', '')}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
    }


def write_if_changed(file: Path, content: bytes) -> None:
    """Leaves the time of a file alone where it can, so that no more is built than must be."""
    if not file.exists() or file.read_bytes() != content:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def copy_tree(target: Path) -> None:
    """Copies what git knows or would take, with the switches in its C++."""
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
    """Makes a copy for each job; builds in the first one what the others get, too."""
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
            # The module, the library, and what they were built for.
            for pattern in ("_[Cb]*.[sj]*", "lib/*.so", "share/cmake/amp_ext/amp_extBuild.cmake"):
                for file in (tree(0) / "amp_ext").glob(pattern):
                    write_if_changed(tree(job) / file.relative_to(tree(0)), file.read_bytes())
            subprocess.run(emulator, cwd=tree(job), env=environment(job), stdout=log, check=True)
            print(f"{tree(job)} is built")


def files_named(tests: str) -> list[str]:
    """Returns the files of tests, "adam sgd" for test_adam.py and test_sgd.py."""
    found = ((ROOT / "tests").rglob(f"test_{name}.py") for name in tests.split())
    return [str(file.relative_to(ROOT)) for files in found for file in files]


def run_tests(number: int, fault: Fault, job: int) -> dict[str, str]:
    """Runs the tests of a fault in the copy of a job; returns what came of it."""
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
        if code in (0, 5):  # 5: none was collected
            continue
        if code in (124, 137):  # the budget is spent
            is_whole = False
            continue
        text = log.read_text()
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
        how = "a hang" if "Timeout (" in text else f"exit code {code}"
        return {"result": "killed", "by": failed[0] if failed else how}
    return {"result": "survived" if is_whole else "survived, not all tests were run"}


def run_one(number: int, fault: Fault, job: int) -> dict[str, str]:
    """Puts a fault into the copy of a job as long as its tests run."""
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
    """Runs the tests of all faults that have no result yet, or of those that are wanted."""
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
    """Does what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2, help="copies that are tested side by side")
    parser.add_argument("--only", default="", help="numbers of faults, separated by commas")
    options = parser.parse_args()
    prepare(options.jobs)
    run_all(options.only, options.jobs)


if __name__ == "__main__":
    main()
