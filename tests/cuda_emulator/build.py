"""Compiles the CUDA sources for the emulator: as an extension module, and as programs of their own.

    python tests/cuda_emulator/build.py emulated address,undefined

builds the module with these sanitizers (or none) and prints its path; ``cpu`` in its place stands
for the module without CUDA, ``program`` for the one that launches every kernel.

Objects are kept in ``build/cuda_emulator`` under a hash of their command and of everything that
they were compiled from, so that nothing is compiled twice and a change of any header is seen.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

EMULATOR = Path(__file__).resolve().parent
ROOT = EMULATOR.parent.parent
CSRC = ROOT / "csrc"
INCLUDE = ROOT / "csrc" / "include"
CACHE = ROOT / "build" / "cuda_emulator"

CXX = os.environ.get("CXX", "g++")

# What setup.py passes, as far as it can change a result, but optimized for a short build.
FLAGS = ["-std=c++20", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
FLAGS += [f"-I{CSRC}", f"-I{INCLUDE}", f"-I{EMULATOR}"]
EMULATE = ["-DAMP_EXT_CUDA_EMULATOR"]
# The module holds its own copy of every class beside those of amp_ext._C, under another namespace.
EMULATED_MODULE = [*EMULATE, "-DAMP_EXT_WITH_CUDA=1", "-Damp_ext=amp_ext_emulated"]
EMULATED_MODULE += ["-fvisibility=hidden"]
WATCHED = ["-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1"]
# Checks of an access are calls, which halves the time that gcc takes.
WATCHED += ["--param=asan-instrumentation-with-call-threshold=0"]
# What AddressSanitizer does not find; gcc's "undefined" also checks each reference, in twice the
# time. An array at the end of a struct is no longer than it says.
UNDEFINED = "alignment,bounds-strict,shift,signed-integer-overflow"
UNDEFINED += ",integer-divide-by-zero,bool,enum"

Command = list[str]
Job = TypeVar("Job")


def why_no_emulator() -> str | None:
    """The emulator changes stacks in assembly."""
    machine = platform.machine()
    return None if machine == "x86_64" else f"the CUDA emulator needs x86-64, not {machine}"


def sanitizer_flags(sanitizers: str) -> Command:
    if not sanitizers:
        return []
    return [f"-fsanitize={sanitizers.replace('undefined', UNDEFINED)}", *WATCHED]


def torch_flags() -> tuple[Command, Command]:
    """Returns what compiling and linking against torch and Python takes."""
    from torch.utils import cpp_extension

    folders = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    library = cpp_extension.library_paths()[0]
    names = ("torch_python", "torch", "torch_cpu", "c10")
    return (
        [flag for folder in folders for flag in ("-isystem", folder)],
        [f"-L{library}", f"-Wl,-rpath,{library}", *(f"-l{name}" for name in names)],
    )


def host_sources() -> list[Path]:
    """Returns two sources that include all those that know torch.

    To read torch's headers takes longer than to compile one of ours; setup.py does the same.
    """
    files = sorted(CSRC.rglob("*.cpp"))
    bindings = [file for file in files if file.parent.name == "python"]
    others = [file for file in files if file.parent.name not in ("python", "cpu", "libtorch")]
    return [united("python", bindings), united("others", others)]


def united(name: str, files: list[Path]) -> Path:
    """Writes a source that includes others, and returns where."""
    source = CACHE / "united" / f"{name}.cpp"
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text("".join(f'#include "{file}"\n' for file in files))
    return source


def kernel_sources() -> list[Path]:
    """Returns the sources of kernels, those that take longest first."""
    return sorted(CSRC.glob("cuda/*.cu"), reverse=True)


def digest(command: Command, files: list[Path]) -> str:
    """Returns a hash of a command and of the content of files."""
    text = hashlib.sha256("\0".join(command).encode())
    for file in files:
        text.update(str(file).encode() + file.read_bytes())
    return text.hexdigest()[:24]


def run(command: Command) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[:4000]}")


def sources_in(depfile: Path) -> list[Path]:
    """Returns the files of this repository that a compilation has read."""
    names = depfile.read_text().replace("\\\n", " ").split()[1:]
    return sorted({Path(name) for name in names if Path(name).is_relative_to(ROOT)})


def compiled(source: Path, flags: Command) -> Path:
    """Returns the object file of a source, compiled unless it is there already."""
    command = [CXX, *flags, "-x", "c++", "-c", str(source)]
    folder = CACHE / digest(command, [])
    depfile = folder / "read.d"
    with contextlib.suppress(OSError):  # never compiled, or a header is gone
        known = folder / f"{digest(command, sources_in(depfile))}.o"
        if known.exists():
            return known
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.o"):
        old.unlink()
    made = folder / "new"
    while True:
        started = time.time()
        run([*command, "-MMD", "-MF", str(depfile), "-o", str(made)])
        sources = sources_in(depfile)
        if all(file.stat().st_mtime < started for file in sources):  # not edited meanwhile
            return made.rename(folder / f"{digest(command, sources)}.o")


def linked(name: str, objects: list[Path], flags: Command) -> Path:
    """Returns what the objects are linked to, linked unless it is there already."""
    command = [CXX, *map(str, objects), *flags]
    target = CACHE / digest(command, []) / name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        made = target.with_suffix(".new")
        run([*command, "-o", str(made)])
        made.rename(target)
    return target


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Waits for other processes that build here."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def side_by_side(function: Callable[[Job], Path], jobs: Iterable[Job]) -> list[Path]:
    """Runs a function for each job, one a core; the order is kept."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(function, jobs))


def compiled_all(jobs: list[tuple[Path, Command]]) -> list[Path]:
    return side_by_side(lambda job: compiled(*job), jobs)


# The emulator's own source, which is compiled without sanitizers.
SCHEDULER = (EMULATOR / "cuda_emulator.cpp", [*FLAGS, *EMULATE, "-O2"])


def linked_module(objects: list[Path], sanitizers: Command) -> Path:
    name = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    return linked(name, objects, ["-shared", "-fopenmp", *sanitizers, *torch_flags()[1]])


def build_emulated(sanitizers: str = "") -> Path:
    """Builds everything that amp_ext._C holds, with CUDA kernels that take CPU tensors.

    Args:
        sanitizers: For the kernels, as gcc's ``-fsanitize=`` takes them.

    Returns:
        The extension module ``_C``.
    """
    sanitize = sanitizer_flags(sanitizers)
    host = [*FLAGS, *EMULATED_MODULE, "-O0", "-fopenmp", *torch_flags()[0]]
    kernels = [*FLAGS, *EMULATED_MODULE, "-O1", *sanitize]
    with alone():
        jobs = [(source, host) for source in (*host_sources(), EMULATOR / "no_engine.cpp")]
        jobs += [(source, kernels) for source in kernel_sources()]
        return linked_module(compiled_all([*jobs, SCHEDULER]), sanitize)


def engine_in_use() -> str:
    """Returns the file of the CPU engine that takes the steps here."""
    import torch

    widest = torch.backends.cpu.get_cpu_capability().lower()
    isa = os.environ.get("AMP_EXT_CPU_ISA") or widest.replace("default", "plain")
    return f"engine_{isa}"


def build_cpu(sanitizers: str) -> Path:
    """Builds amp_ext._C without CUDA.

    The sanitizers watch the operators and the engine in use, but neither the bindings nor the other
    engines, which take minutes to compile.
    """
    sanitize = sanitizer_flags(sanitizers)
    flags = [*FLAGS, "-fvisibility=hidden", "-fopenmp", *torch_flags()[0]]
    watched = {"others", "engine", engine_in_use()}
    with alone():
        jobs = [
            (source, [*flags, "-O1", *sanitize] if source.stem in watched else [*flags, "-O0"])
            for source in (*host_sources(), *CSRC.glob("cpu/*.cpp"))
        ]
        return linked_module(compiled_all(jobs), sanitize)


def build_programs(programs: list[tuple[list[Path], str]]) -> list[Path]:
    """Builds programs that know nothing of torch, from their sources and under their sanitizers."""

    def link(program: tuple[list[Path], str]) -> Path:
        sources, sanitizers = program
        parts = [objects[source, sanitizers] for source in sources]
        return linked(sources[0].stem, [*parts, runtime], sanitizer_flags(sanitizers))

    parts = [(source, sanitizers) for sources, sanitizers in programs for source in sources]
    jobs = [(source, [*FLAGS, *EMULATE, "-O1", *sanitizer_flags(name)]) for source, name in parts]
    with alone():
        *made, runtime = compiled_all([*jobs, SCHEDULER])
        objects = dict(zip(parts, made, strict=True))
        return side_by_side(link, programs)


def build_program(sanitizers: str = "") -> Path:
    """Builds the program that launches every kernel."""
    return build_programs([([EMULATOR / "every_kernel.cu", *kernel_sources()], sanitizers)])[0]


if __name__ == "__main__":
    what, *options = sys.argv[1:]
    builders = {
        "emulated": build_emulated,
        "cpu": build_cpu,
        "program": build_program,
    }
    print(builders[what](*options))
