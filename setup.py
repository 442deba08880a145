"""Builds amp_ext against the PyTorch of this environment: a library, and a module for Python.

`amp_ext/lib/libamp_ext.so` has everything but the bindings and knows no Python: programs in C++
link it, too. `amp_ext._C` holds the bindings and links it.

Environment: AMP_EXT_CUDA=0|1 forces the CUDA backend off or on. CUDA_HOME, TORCH_CUDA_ARCH_LIST,
MAX_JOBS and CXX mean what they mean to PyTorch.
"""

import functools
import hashlib
import importlib.util
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from glob import glob
from pathlib import Path

import setuptools

ROOT = Path(__file__).resolve().parent
INSTALL = (
    '    pip install torch "setuptools>=77,<82" ninja wheel && pip install --no-build-isolation .\n'
)

LIBRARY, MODULE = "amp_ext.lib.libamp_ext", "amp_ext._C"
# Whose sources are compiled one by one. Those of csrc/libtorch/ are compiled as one, those of
# csrc/python/, which alone need Python, and so are all others: PyTorch's headers take longer than
# they do.
ENGINES = ("csrc/cpu", "csrc/cuda")


def flags_of(kind: str) -> list[str]:
    """Returns what csrc says that something is compiled or linked with."""
    lines = (ROOT / "csrc" / f"{kind}_flags.txt").read_text().splitlines()
    return [line for line in lines if line.startswith("-")]


def fail(message: str) -> None:
    """Ends the build with a message that pip shows as it is."""
    sys.exit(f"\namp_ext: {message}")


if importlib.util.find_spec("torch") is None:
    fail(
        "the build needs PyTorch and cannot see it. PyTorch must be installed first, and pip must\n"
        "be told not to hide it (--no-build-isolation): the binary fits only the PyTorch that it\n"
        f"was compiled against. Run:\n\n{INSTALL}"
    )
if int(setuptools.__version__.split(".")[0]) < 77:
    fail(f"setuptools {setuptools.__version__} is too old, 77 is needed. Run:\n\n{INSTALL}")

import torch  # noqa: E402


def first_line(*command: str) -> str | None:
    """Returns the first line a command prints, or None if it fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.partition("\n")[0]


def find_cuda_home() -> str | None:
    """Returns the folder of the CUDA toolkit, or None.

    ``nvcc`` on the PATH may be a wrapper script, so it is asked for its folder. PyTorch would take
    the folder that the wrapper lies in.
    """
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if given := os.environ.get(name):
            if not os.access(f"{given}/bin/nvcc", os.X_OK):
                fail(
                    f"{name} is {given}, which has no bin/nvcc. Set it to the folder of a CUDA\n"
                    "toolkit, unset it, or set AMP_EXT_CUDA=0 to build for the CPU alone."
                )
            return given
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        return None
    plan = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True
    )
    top = re.search(r"^#\$ TOP=(.+)$", plan.stderr, re.MULTILINE)
    return str(Path(top[1].strip()).resolve()) if top else None


@functools.cache
def toolkit_version(cuda_home: str) -> tuple[int, int]:
    """Returns the version of a CUDA toolkit."""
    text = subprocess.run([f"{cuda_home}/bin/nvcc", "--version"], capture_output=True, text=True)
    release = re.search(r"release (\d+)\.(\d+)", text.stdout)
    if release is None:
        fail(f"{cuda_home}/bin/nvcc --version names no release.")
    return int(release[1]), int(release[2])


def choose_cuda() -> bool:
    """Says whether to build the CUDA backend, and points PyTorch to the toolkit if so."""
    choice = os.environ.get("AMP_EXT_CUDA", "")
    if choice not in ("", "0", "1"):
        fail(f"AMP_EXT_CUDA must be 0 or 1, got {choice!r}.")
    if choice == "0":
        return False

    if torch.version.cuda is None:
        if choice == "1":
            fail(f"AMP_EXT_CUDA=1, but PyTorch {torch.__version__} is built without CUDA.")
        return False
    cuda_home = find_cuda_home()
    if cuda_home is None:
        missing = (
            f"PyTorch {torch.__version__} uses CUDA {torch.version.cuda}, but no nvcc of its "
            "toolkit is found (CUDA_HOME is not set)"
        )
        if choice == "1":
            fail(f"AMP_EXT_CUDA=1. {missing}.")
        print(f"amp_ext: {missing}.")
        return False

    toolkit = toolkit_version(cuda_home)
    if toolkit[0] != int(torch.version.cuda.split(".")[0]):
        fail(
            f"the CUDA toolkit is {toolkit[0]}.{toolkit[1]} (CUDA_HOME={cuda_home}), but PyTorch\n"
            f"{torch.__version__} uses CUDA {torch.version.cuda}. Set CUDA_HOME to a toolkit of\n"
            "that major version, or AMP_EXT_CUDA=0 to build for the CPU alone."
        )
    os.environ["CUDA_HOME"] = cuda_home
    if not os.environ.get("TORCH_CUDA_ARCH_LIST") and not torch.cuda.is_available():
        newest = ";10.0;12.0+PTX" if toolkit >= (12, 8) else "+PTX"
        os.environ["TORCH_CUDA_ARCH_LIST"] = f"7.5;8.0;8.6;9.0{newest}"
    return True


def numbers_in(file: Path) -> list[float]:
    """Returns the numbers in a file of a control group, none if it is not there."""
    words = file.read_text().split() if file.is_file() else []
    return [math.inf if word in ("max", "-1") else int(word) for word in words]


def limits_of_groups(root: Path) -> tuple[float, float]:
    """Returns the memory and the cores that control groups leave to this process.

    Args:
        root: The folder that has ``proc`` and ``sys``.
    """
    memory = cores = math.inf
    listed = root / "proc/self/cgroup"
    for line in listed.read_text().splitlines() if listed.is_file() else ():
        _, controllers, path = line.split(":", 2)  # version 2 names no controllers
        for controller in controllers.split(","):
            # In a container this may be the group itself, while the path is that of the host.
            group = root / "sys/fs/cgroup" / controller
            for part in path.split("/"):
                group /= part
                for name in ("memory.max", "memory.limit_in_bytes"):
                    memory = min([memory, *numbers_in(group / name)])
                period = numbers_in(group / "cpu.cfs_period_us")
                quota = numbers_in(group / "cpu.max") or numbers_in(group / "cpu.cfs_quota_us")
                if quota:
                    cores = min(cores, quota[0] / [*quota, *period][1])
    return memory, cores


def bound_jobs(root: Path = Path("/")) -> None:
    """Sets MAX_JOBS, unless given: a job per core, and 2 GiB of memory for each."""
    memory, cores = limits_of_groups(root)
    memory = min(memory, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    jobs = max(1, int(min(len(os.sched_getaffinity(0)), cores, memory // 2**31)))
    os.environ.setdefault("MAX_JOBS", str(jobs))


with_cuda = choose_cuda()
bound_jobs()
# PyTorch looks for ninja on the PATH, which lacks the scripts of an environment not activated.
os.environ["PATH"] += os.pathsep + sysconfig.get_path("scripts")

from setuptools.command import bdist_wheel  # noqa: E402

# It fixes CUDA_HOME when it is imported.
from torch.utils import cpp_extension  # noqa: E402

define = ["-DAMP_EXT_WITH_CUDA=1"] if with_cuda else []
flags = {"cxx": flags_of("cxx") + define, "nvcc": flags_of("nvcc") + define if with_cuda else []}
if with_cuda and toolkit_version(os.environ["CUDA_HOME"]) >= (13, 0):
    # A sixth of the size. Older drivers, which don't expand it, don't take CUDA 13 either.
    flags["nvcc"].append("--compress-mode=size")
own_include_dirs = [str(ROOT / "csrc"), str(ROOT / "amp_ext" / "include")]
device_type = "cuda" if with_cuda else "cpu"
include_dirs = own_include_dirs + cpp_extension.include_paths(device_type)
library_dirs = cpp_extension.library_paths(device_type)
torch_folder = str(Path(torch.__file__).parent)

# CMakeLists.txt takes the same files.
core = glob("csrc/**/*.cpp", recursive=True)
core += glob("csrc/cuda/*.cu") if with_cuda else []
bindings = sorted(file for file in core if file.startswith("csrc/python"))
core = sorted(set(core) - set(bindings))


def architectures() -> list[str]:
    """Returns what the library holds for GPUs: sm_90 is machine code, compute_90 is PTX."""
    if not with_cuda:
        return []
    return sorted(set(re.findall(r",code=(\w+)", " ".join(cpp_extension._get_cuda_arch_flags()))))


def digest() -> str:
    """Returns a hash of what the library and the module are compiled from."""
    text = hashlib.sha256(json.dumps([torch.__version__, flags, architectures()]).encode())
    for folder in own_include_dirs:
        for file in sorted(file for file in Path(folder).rglob("*") if file.is_file()):
            text.update(file.read_bytes())
    return text.hexdigest()[:12]


def describe(build: str, version: str, torch_folder: str | None) -> dict[str, object]:
    """Returns what the files say that tell how the package was built.

    Args:
        build: The name of this build.
        version: Of the package.
        torch_folder: Of PyTorch, where it does not lie beside the package.
    """
    gpus = range(torch.cuda.device_count())
    visible = {".".join(map(str, torch.cuda.get_device_capability(gpu))) for gpu in gpus}
    arch_list = os.environ.get("TORCH_CUDA_ARCH_LIST") or ";".join(sorted(visible))
    toolkit = "{}.{}".format(*toolkit_version(os.environ["CUDA_HOME"])) if with_cuda else None
    # The commit, with -dirty behind it if files differ from it.
    commit = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return {
        "build": build,
        "version": version,
        "torch": torch.__version__,
        "torch_folder": torch_folder,
        "cuda": torch.version.cuda if with_cuda else None,
        "toolkit": toolkit,
        "cuda_home": os.environ["CUDA_HOME"] if with_cuda else None,
        "python": platform.python_version(),
        "compiler": first_line(cpp_extension.get_cxx_compiler(), "--version"),
        "arch_list": re.split("[; ]+", arch_list) if with_cuda else [],
        "architectures": architectures(),
        "backends": ["cpu", "cuda"] if with_cuda else ["cpu"],
        "flags": flags,
        "git": first_line(*commit) if (ROOT / ".git").exists() else None,
    }


class BuildExtension(cpp_extension.BuildExtension):
    """Builds the library, the module that links it, and files that say how they were built."""

    def run(self) -> None:
        """Builds, then writes ``_build_info.json`` for Python and ``amp_extBuild.cmake``."""
        backends = "cpu and cuda" if with_cuda else "cpu"
        print(f"amp_ext: building {backends} for PyTorch {torch.__version__}")
        self.in_place = bool(self.inplace)  # which is no more to be seen while extensions are built
        version = self.distribution.get_version().split("+")[0]  # that of a wheel has more
        release = torch.__version__.split("+")[0]
        self.build_name = f"AMP_EXT_{version}_torch_{release}_{digest()}"
        try:
            super().run()
        except Exception as error:
            raise RuntimeError(
                f"{error}\n\namp_ext: if the compiler was killed, there was too little memory for "
                f"MAX_JOBS={os.environ['MAX_JOBS']} compilers at once: set MAX_JOBS to fewer."
            ) from error
        package = Path(self.get_ext_fullpath(MODULE)).parent
        info = describe(self.build_name, version, torch_folder if self.in_place else None)
        (package / "_build_info.json").write_text(json.dumps(info, indent=2) + "\n")
        for_cmake = Path("share", "cmake", "amp_ext", "amp_extBuild.cmake")
        text = (ROOT / "amp_ext" / f"{for_cmake}.in").read_text()
        (package / for_cmake).parent.mkdir(parents=True, exist_ok=True)
        (package / for_cmake).write_text(
            re.sub("@(\\w+)@", lambda name: str(info[name[1]] or ""), text)
        )

    def get_ext_filename(self, fullname: str) -> str:
        """Gives the library a name without a version of Python in it."""
        if fullname.split(".")[-1] == LIBRARY.split(".")[-1]:
            return f"{fullname.replace('.', os.sep)}.so"
        return super().get_ext_filename(fullname)

    def build_extension(self, extension: setuptools.Extension) -> None:
        """Compiles all sources at once, and adds what is known only now to what is linked."""
        for of_compiler in extension.extra_compile_args.values():
            # PyTorch adds it, and no source asks for it: what is compiled for the one fits both.
            of_compiler[:] = [flag for flag in of_compiler if "TORCH_EXTENSION_NAME" not in flag]
        of_python = self.unite("python", bindings)
        if extension.name == MODULE:
            extension.sources = [of_python]
            extension.library_dirs.insert(0, str(Path(self.get_ext_fullpath(LIBRARY)).parent))
        else:
            alone = [file for file in core if file.startswith(ENGINES)]
            libtorch = [file for file in core if file.startswith("csrc/libtorch")]
            others = [file for file in core if file not in (*alone, *libtorch)]
            # One takes longer than an engine, the other shorter, so that no core waits long for
            # another at the end.
            longer, shorter = self.unite("libtorch", libtorch), self.unite("others", others)
            extension.sources = [longer, *alone, shorter]
            if self.use_ninja:
                # Each extension has its own run of ninja, which finds then that all is done.
                self.compiler.compile(
                    [of_python, *extension.sources],
                    output_dir=self.build_temp,
                    include_dirs=extension.include_dirs,
                    extra_postargs=extension.extra_compile_args,
                )
            exports = Path(self.build_temp, "exports.map")
            exports.parent.mkdir(parents=True, exist_ok=True)
            text = (ROOT / "csrc" / "exports.map.in").read_text()
            exports.write_text(text.replace("@AMP_EXT_BUILD@", self.build_name))
            extension.extra_link_args.append(f"-Wl,--version-script={exports}")
            if self.in_place:  # PyTorch does not lie beside the sources
                extension.extra_link_args.append(f"-Wl,-rpath,{torch_folder}/lib")
        super().build_extension(extension)

    def unite(self, name: str, files: list[str]) -> str:
        """Writes a source that includes others, and returns where."""
        united = Path(self.build_temp, "csrc", "united", f"{name}.cpp")
        text = "".join(f'#include "{ROOT / file}"\n' for file in files)
        if not united.is_file() or united.read_text() != text:
            united.parent.mkdir(parents=True, exist_ok=True)
            united.write_text(text)
        return str(united)

    def copy_extensions_to_source(self) -> None:
        """Makes the folder of the library, which the sources lack."""
        Path(self.get_ext_fullpath(LIBRARY)).parent.mkdir(exist_ok=True)
        super().copy_extensions_to_source()


class BuildWheel(bdist_wheel.bdist_wheel):
    """Builds a wheel that asks for the minor release of PyTorch that it was compiled against.

    What is built from sources, which an sdist and an editable install hold, fits the PyTorch that
    it finds: they go on asking for what pyproject.toml says.
    """

    def write_wheelfile(self, wheelfile_base: str, *arguments: object) -> None:
        """Also narrows what the metadata beside that file asks for."""
        if "bdist_wheel" in self.distribution.commands:  # an editable install calls this, too
            # Not by install_requires: pip may have had the metadata made, which are then taken.
            metadata = Path(wheelfile_base, "METADATA")
            minor = ".".join(torch.__version__.split(".")[:2])
            text, count = re.subn(
                r"(?m)^Requires-Dist: torch[<>=].*$",
                f"Requires-Dist: torch=={minor}.*",
                metadata.read_text(encoding="utf-8"),
            )
            if count != 1:
                fail(f"{metadata} must ask for torch once, but does so {count} times.")
            metadata.write_text(text, encoding="utf-8")
        super().write_wheelfile(wheelfile_base, *arguments)


library = setuptools.Extension(
    LIBRARY,
    core,
    include_dirs=include_dirs,
    library_dirs=library_dirs,
    libraries=["c10", "torch_cpu", "torch"]
    + (["c10_cuda", "torch_cuda", "cudart"] if with_cuda else []),
    extra_compile_args=dict(flags),
    extra_link_args=[
        *flags_of("link"),
        "-Wl,-soname,libamp_ext.so",
        "-Wl,-rpath,$ORIGIN/../../torch/lib",
    ],
)
module = setuptools.Extension(
    MODULE,
    bindings,
    include_dirs=include_dirs,
    library_dirs=library_dirs,
    libraries=["amp_ext", "c10", "torch", "torch_cpu", "torch_python"],
    extra_compile_args=dict(flags),
    extra_link_args=[
        "-Wl,--version-script=csrc/python/module.map",
        "-Wl,--enable-new-dtags",
        "-Wl,-rpath,$ORIGIN/lib:$ORIGIN/../torch/lib",
    ],
)
setuptools.setup(
    ext_modules=[library, module],
    cmdclass={"build_ext": BuildExtension, "bdist_wheel": BuildWheel},
)
