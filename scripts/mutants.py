"""Puts faults into copies of the code, one at a time, and shows which of them the tests notice.

    python scripts/mutants.py prepare     # makes the copies in build/mutants, minutes
    python scripts/mutants.py measure     # runs all tests once, to know which runs which line
    python scripts/mutants.py run         # goes on where it was interrupted
    python scripts/mutants.py run --only 3,107 --results build/some.json
    python scripts/mutants.py report

Faults in C++ have numbers from 1, those in Python that were written by hand from 101
(`mutants_by_hand.py`), those that were drawn from 201 (`mutants_drawn.json`, `draw_mutants.py`).

All faults in C++ are compiled into one binary, where the environment variable AMP_EXT_MUTANT
chooses one. Tests run in forks of a process that has imported PyTorch already: first those that run
the faulty line, the fastest of each test function before the others; then, if none has failed,
the rest of them and those that start processes. A test that hangs has noticed the fault.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import mutants_by_hand
from mutants_by_hand import Fault

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "mutants"
DRAWN = ROOT / "scripts" / "mutants_drawn.json"
TESTS = FOLDER / "tests.json"
COVERAGE = FOLDER / "tests.coverage"
RESULTS = FOLDER / "results.json"

FIRST_PYTHON, FIRST_DRAWN = 101, 201
HANG = 180.0  # seconds for one test: it may compile something, on a busy machine
CXX_SUFFIXES = (".h", ".cuh", ".cpp", ".cu")

HEADER = """// Which fault is switched on; put before every source of the copy.
#pragma once
#include <cstdlib>
inline const int amp_ext_mutant = [] {
  const char* const text = std::getenv("AMP_EXT_MUTANT");
  return text == nullptr ? 0 : std::atoi(text);
}();
"""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a fault goes: the text from `begin` to `end` of a file becomes `new`."""

    file: Path  # relative to the root
    begin: int
    end: int
    new: str


# Finding faults.


def sources(root: Path, folder: str, suffixes: tuple[str, ...]) -> dict[Path, str]:
    """Returns the text of all sources below a folder."""
    files = sorted(file for file in (root / folder).rglob("*") if file.suffix in suffixes)
    return {file.relative_to(root): file.read_text() for file in files}


def place_of_fault(fault: Fault, texts: dict[Path, str]) -> Place | None:
    """Finds a fault that was written by hand, if its text is there just once."""
    wanted = fault.after + fault.old
    found = [(file, text) for file, text in texts.items() if wanted in text]
    if len(found) != 1 or found[0][1].count(wanted) != 1:
        return None
    file, text = found[0]
    begin = text.index(wanted) + len(fault.after)
    return Place(file, begin, begin + len(fault.old), fault.new)


def lines_within(text: str) -> Iterator[tuple[str, str, int]]:
    """Yields each line without its indentation, the name of its function, and its offset."""
    names = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):  # inner ones come later
            first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
            names.update(dict.fromkeys(range(first, node.end_lineno + 1), node.name))
    offset = 0
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        bare = line.strip()
        yield bare, names.get(number, ""), offset + line.find(bare)
        offset += len(line)


def place_of_drawn(row: dict[str, Any], texts: dict[Path, str]) -> Place | None:
    """Finds a fault that was drawn: in its file, else in the only function that has the line."""
    offsets = []
    for file in (Path(row["file"]), *texts):
        for bare, name, offset in lines_within(texts.get(file, "")):
            if bare == row["line"] and name == row["within"]:
                offsets.append((file, offset + row["column"]))
        if offsets and file == Path(row["file"]):
            break
    offsets = list(dict.fromkeys(offsets))
    if len({file for file, _ in offsets}) != 1 or len(offsets) <= row["occurrence"]:
        return None
    file, begin = offsets[row["occurrence"]]
    if not texts[file].startswith(row["old"], begin):
        return None
    return Place(file, begin, begin + len(row["old"]), row["new"])


def cxx_places(root: Path) -> dict[int, Place | None]:
    texts = sources(root, "csrc", CXX_SUFFIXES) | sources(root, "amp_ext", CXX_SUFFIXES)
    return {
        number: place_of_fault(fault, texts) for number, fault in enumerate(mutants_by_hand.CXX, 1)
    }


def python_places(root: Path) -> dict[int, Place | None]:
    texts = sources(root, "amp_ext", (".py",))
    by_hand = enumerate(mutants_by_hand.PYTHON, FIRST_PYTHON)
    places = {number: place_of_fault(fault, texts) for number, fault in by_hand}
    drawn = json.loads(DRAWN.read_text()) if DRAWN.exists() else []
    return places | {
        number: place_of_drawn(row, texts) for number, row in enumerate(drawn, FIRST_DRAWN)
    }


# The copies.


def tree(job: int) -> Path:
    return FOLDER / f"tree{job}"


def with_switches(text: str, places: Iterable[tuple[int, Place]]) -> str:
    """Returns a C++ source in which the environment variable chooses between right and wrong."""
    for number, place in sorted(places, key=lambda pair: -pair[1].begin):
        old, chosen = text[place.begin : place.end], f"amp_ext_mutant == {number}"
        if old.endswith(";"):
            switch = f"if ({chosen}) {{ {place.new} }} else {{ {old} }}"
        else:
            switch = f"({chosen} ? ({place.new}) : ({old}))"
        text = text[: place.begin] + switch + text[place.end :]
    return text


def write_if_changed(file: Path, content: bytes) -> None:
    if not file.exists() or file.read_bytes() != content:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def copy_tree(target: Path) -> None:
    """Copies what git knows or would take, with the switches in its C++."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    names = {name for name in listed if name and (ROOT / name).is_file()}
    for file in [file for folder in ("csrc", "amp_ext", "tests") for file in target.glob(folder)]:
        for old in [old for old in file.rglob("*") if old.suffix in (*CXX_SUFFIXES, ".py")]:
            if str(old.relative_to(target)) not in names:
                old.unlink()
    places: dict[str, list[tuple[int, Place]]] = {}
    for number, place in cxx_places(ROOT).items():
        if place is not None:
            places.setdefault(str(place.file), []).append((number, place))
    for name in sorted(names):
        content = (ROOT / name).read_bytes()
        if name in places:
            content = with_switches(content.decode(), places[name]).encode()
        write_if_changed(target / name, content)
        shutil.copymode(ROOT / name, target / name)


def environment(job: int, number: int = 0) -> dict[str, str]:
    """Returns the variables under which a copy is built and tested."""
    return {
        "AMP_EXT_MUTANT": str(number),
        "CXX": str(FOLDER / "bin" / "g++"),
        "PYTHONPATH": str(tree(job)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
    }


def prepare(jobs: int) -> None:
    """Makes a copy for each job and builds the binaries in it."""
    write_if_changed(FOLDER / "mutant.h", HEADER.encode())
    compiler = FOLDER / "bin" / "g++"
    write_if_changed(compiler, f'#!/bin/sh\nexec g++ -include "{FOLDER}/mutant.h" "$@"\n'.encode())
    compiler.chmod(0o755)
    for job in range(jobs):
        copy_tree(tree(job))
        own = os.environ | environment(job)
        if job == 0:
            build = [sys.executable, "setup.py", "build_ext", "--inplace"]
            with (FOLDER / "build.log").open("w") as log:
                subprocess.run(build, cwd=tree(0), env=own, stdout=log, stderr=log, check=True)
        package = tree(0) / "amp_ext"
        # The module, the library, and what they were built for.
        built = ("_[Cb]*.[sj]*", "lib/*.so", "share/cmake/amp_ext/amp_extBuild.cmake")
        for file in [file for pattern in built for file in package.glob(pattern)]:
            write_if_changed(tree(job) / file.relative_to(tree(0)), file.read_bytes())
        emulator = [sys.executable, "tests/cuda_emulator/build.py", "emulated"]
        subprocess.run(emulator, cwd=tree(job), env=own, stdout=subprocess.DEVNULL, check=True)
        print(f"{tree(job)} is built")


# Running tests.


class Chosen:
    """A plugin of pytest that runs chosen tests in their order and says how far it is."""

    def __init__(self, order: list[str], log: Path) -> None:
        self.places = {name: place for place, name in enumerate(order)}
        self.log = log.open("w", buffering=1)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if item.nodeid in self.places]
        items.sort(key=lambda item: self.places[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.log.write(json.dumps(["start", nodeid, time.time()]) + "\n")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.log.write(json.dumps(["failed", report.nodeid, time.time()]) + "\n")


class Measured:
    """A plugin of pytest that notes how long tests take, which lines they run, who forks."""

    def __init__(self, package: Path) -> None:
        import coverage

        self.coverage = coverage.Coverage(data_file=str(COVERAGE), source=[str(package)])
        self.coverage.erase()
        self.coverage.start()
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()
        self.starts_processes: set[str] = set()
        self.current = ""
        sys.addaudithook(self._note)
        start = BaseProcess.start

        def noted_start(process: BaseProcess) -> None:
            self._note("os.fork", None)  # a server that forks tells nothing
            start(process)

        BaseProcess.start = noted_start

    def _note(self, event: str, _: Any) -> None:
        if event in ("subprocess.Popen", "os.posix_spawn", "os.fork") and self.current:
            self.starts_processes.add(self.current)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.current = nodeid
        self.coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if not report.passed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        self.coverage.save()
        passed = {k: round(v, 4) for k, v in self.seconds.items() if k not in self.failed}
        processes = sorted(self.starts_processes)
        TESTS.write_text(json.dumps({"seconds": passed, "processes": processes}, indent=0))


def import_what_is_slow() -> None:
    os.environ.update({"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"})
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch.distributed
    import torch.utils.cpp_extension  # noqa: F401


def fork(job: int, number: int, arguments: list[str], plugin: Any, output: Path) -> int:
    """Runs pytest in a fork of this process, in the copy of a job; returns its process id."""
    process = os.fork()
    if process != 0:
        return process
    code = 3
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.chdir(tree(job))
        os.environ.update(environment(job, number))
        sys.dont_write_bytecode = number != 0
        sys.path[:] = [str(tree(job)), *(p for p in sys.path if not p.startswith(str(ROOT)))]
        sys.modules["__main__"] = ModuleType("__main__")  # processes of tests would run this file
        import pytest

        plugins = [plugin()]
        code = pytest.main(["-q", "-p", "no:cacheprovider", *arguments], plugins=plugins)
    finally:
        sys.stdout.flush()
        os._exit(code)


def measure() -> int:
    """Runs all tests of the first copy once, without a fault; returns pytest's exit code."""
    import_what_is_slow()
    package = tree(0) / "amp_ext"
    process = fork(0, 0, [], lambda: Measured(package), FOLDER / "measure.log")
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    print((FOLDER / "measure.log").read_text()[-1000:])
    return code


class Tests:
    """Which tests to run for a fault, and in which order."""

    def __init__(self) -> None:
        import coverage

        measured = json.loads(TESTS.read_text())
        self.seconds: dict[str, float] = measured["seconds"]
        self.processes = [name for name in measured["processes"] if name in self.seconds]
        self._data = coverage.CoverageData(str(COVERAGE))
        self._data.read()

    def ordered(self, names: Iterable[str]) -> list[str]:
        """Returns the fastest case of each test function, then the other cases, the fast first."""
        fast = sorted(
            {name for name in names if name in self.seconds}, key=self.seconds.__getitem__
        )
        seen: Counter[str] = Counter()
        turns = {}
        for name in fast:
            function = name.partition("[")[0]
            turns[name] = seen[function]
            seen[function] += 1
        return sorted(fast, key=lambda name: min(turns[name], 1))  # keeps the fast first

    def of_line(self, file: Path, first: int, last: int) -> list[str]:
        """Returns the tests that run one of these lines, or the file if an import runs the line."""
        by_line = self._data.contexts_by_lineno(str(tree(0) / file))
        near = {name for line in range(first, last + 1) for name in by_line.get(line, ())}
        names = near - {""} or {name for some in by_line.values() for name in some}
        return self.ordered(names)

    def of_files(self, files: str) -> list[str]:
        """Returns the tests of some files, named without folder, `test_` and `.py`."""
        wanted = {f"test_{file}.py" for file in files.split()}
        return self.ordered(
            name for name in self.seconds if Path(name.partition("::")[0]).name in wanted
        )


@dataclasses.dataclass
class Run:
    """The tests of one fault that are under way."""

    number: int
    job: int
    stages: list[list[str]]
    restore: tuple[Path, bytes, int] | None  # file, what it was, its time
    budget: float
    passed: int = 0
    process: int = 0
    started: float = dataclasses.field(default_factory=time.time)

    @property
    def log(self) -> Path:
        return FOLDER / f"progress{self.job}.jsonl"

    def start_stage(self) -> None:
        order = self.stages[0]
        files = sorted({name.partition("::")[0] for name in order})
        log = self.log
        log.write_text("")
        self.process = fork(
            self.job,
            self.number,
            ["-x", *files],
            lambda: Chosen(order, log),
            log.with_suffix(".log"),
        )

    def events(self) -> list[list[Any]]:
        lines = self.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("]")]

    def stop(self) -> None:
        os.killpg(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)

    def poll(self, seconds: dict[str, float]) -> dict[str, Any] | None:
        """Returns the result, once there is one."""
        done, status = os.waitpid(self.process, os.WNOHANG)
        events, now = self.events(), time.time()
        current, since = (events[-1][1], events[-1][2]) if events else ("collection", self.started)
        if not done:
            if events and now - since > max(HANG, 60 * seconds.get(current, 1.0)):
                self.stop()
                return {"result": "killed", "by": current, "how": "hang"}
            if now - self.started > self.budget:
                self.stop()
                return {"result": "survived", "how": "not all tests were run"}
            return None
        code = os.waitstatus_to_exitcode(status)
        if code not in (0, 5):  # 5: none was collected
            failed = [name for what, name, _ in events if what == "failed"]
            how = "failed" if failed else f"exit code {code}"
            return {"result": "killed", "by": (failed or [current])[0], "how": how}
        self.passed += sum(what == "start" for what, _, _ in events)
        self.stages.pop(0)
        if not self.stages:
            return {"result": "survived", "how": "all tests passed"}
        self.start_stage()
        return None

    def finish(self) -> None:
        if self.restore is not None:
            file, content, modified = self.restore
            file.write_bytes(content)
            os.utime(file, ns=(modified, modified))


def stages_of(number: int, place: Place, tests: Tests, at_first: int) -> list[list[str]]:
    """Returns the tests of a fault, those that are run at first and those after them."""
    if number < FIRST_PYTHON:
        first = tests.of_files(mutants_by_hand.CXX[number - 1].tests)
        rest = tests.ordered(set(tests.seconds) - set(first))
        return [stage for stage in (first, rest) if stage]
    text = (ROOT / place.file).read_text()
    line, last = (text.count("\n", 0, at) + 1 for at in (place.begin, place.end))
    covering = tests.of_line(place.file, line, last)
    processes = [name for name in tests.ordered(tests.processes) if name not in set(covering)]
    rest = covering[at_first:] + processes
    return [stage for stage in (covering[:at_first], rest) if stage]


def begin(number: int, place: Place, job: int, tests: Tests, options: argparse.Namespace) -> Run:
    """Puts a fault into the copy of a job and starts its first tests."""
    restore = None
    if number >= FIRST_PYTHON:
        file = tree(job) / place.file
        content = file.read_bytes()
        restore = (file, content, file.stat().st_mtime_ns)
        text = content.decode()
        write_if_changed(file, (text[: place.begin] + place.new + text[place.end :]).encode())
    stages = stages_of(number, place, tests, options.first)
    run = Run(number, job, stages, restore, options.budget)
    if stages:
        run.start_stage()
    return run


def describe(place: Place) -> dict[str, Any]:
    text = (ROOT / place.file).read_text()
    where = f"{place.file}:{text.count(chr(10), 0, place.begin) + 1}"
    return {"where": where, "old": text[place.begin : place.end], "new": place.new}


def check_copy(job: int, tests: Tests) -> None:
    """Runs some tests in a copy without any fault, which also compiles all of them to bytecode."""
    copy_tree(tree(job))  # an interrupted run leaves its fault behind
    log = FOLDER / f"check{job}.jsonl"
    chosen = tests.ordered(tests.seconds)[:300]
    process = fork(job, 0, ["-x"], lambda: Chosen(chosen, log), log.with_suffix(".log"))
    if os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) != 0:
        sys.exit(f"without a fault the tests must pass: see {log.with_suffix('.log')}")


def run_all(options: argparse.Namespace) -> None:
    """Runs the tests of all faults, or of those that are wanted, and writes each result."""
    import_what_is_slow()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    tests = Tests()
    for job in range(options.jobs):
        check_copy(job, tests)
    results: dict[str, Any] = {}
    if options.results.exists():
        results = json.loads(options.results.read_text())
    places = cxx_places(ROOT) | python_places(ROOT)
    wanted = [int(number) for number in options.only.split(",")] if options.only else list(places)
    waiting = [number for number in wanted if options.only or str(number) not in results]
    running: dict[int, Run] = {}

    def record(number: int, result: dict[str, Any]) -> None:
        place = places[number]
        results[str(number)] = result | (describe(place) if place is not None else {})
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(results, indent=1) + "\n")
        print(number, result["result"], result.get("how", ""), result.get("by", ""), flush=True)

    try:
        while waiting or running:
            for job in [job for job in range(options.jobs) if job not in running and waiting]:
                number = waiting.pop(0)
                place = places[number]
                if place is None:
                    record(number, {"result": "not found"})
                    continue
                run = begin(number, place, job, tests, options)
                if run.stages:
                    running[job] = run
                else:
                    run.finish()
                    record(number, {"result": "survived", "how": "no test runs the line"})
            for job, run in list(running.items()):
                result = run.poll(tests.seconds)
                if result is not None:
                    run.finish()
                    seconds = round(time.time() - run.started, 1)
                    record(run.number, result | {"passed": run.passed, "seconds": seconds})
                    del running[job]
            time.sleep(0.05)
    finally:
        for run in running.values():  # interrupted
            run.stop()
            run.finish()


def report(file: Path) -> None:
    """Prints how many faults were noticed, and the others."""
    results = json.loads(file.read_text())
    kinds = {
        "C++": (1, FIRST_PYTHON),
        "Python": (FIRST_PYTHON, FIRST_DRAWN),
        "drawn": (FIRST_DRAWN, 9999),
    }
    for kind, (first, end) in kinds.items():
        rows = [row for number, row in results.items() if first <= int(number) < end]
        print(f"{kind}:", dict(Counter(row["result"] for row in rows)))
    for number, row in sorted(results.items(), key=lambda pair: int(pair[0])):
        if row["result"] != "killed":
            print(f"{number}: {row['result']}, {row.get('how', '')}")
            print(f"    {row.get('where')}\n    - {row.get('old')}\n    + {row.get('new')}")


def main() -> int:
    """Does what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["prepare", "measure", "run", "report"])
    parser.add_argument("--jobs", type=int, default=2, help="copies that are tested side by side")
    parser.add_argument("--only", help="numbers of faults, separated by commas")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--first", type=int, default=40, help="tests that are run at first")
    parser.add_argument("--budget", type=float, default=400.0, help="seconds for one fault")
    options = parser.parse_args()
    options.results = options.results.resolve()
    if options.what == "prepare":
        prepare(options.jobs)
    elif options.what == "measure":
        return measure()
    elif options.what == "run":
        run_all(options)
    else:
        report(options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
