"""Builds amp_ext against the PyTorch of this environment: two libraries and a Python module.

`amp_ext/lib/libamp_ext_kernels.so` has the engines, which know nothing of PyTorch. The library
`amp_ext/lib/libamp_ext.so` has everything else except the bindings. It doesn't depend on Python, so
C++ programs can link it, too. The module `amp_ext._C` has the bindings and links the library.

Environment: AMP_EXT_CUDA=0|1 forces the CUDA backend off or on; if it is not set, the backend is
built if PyTorch has CUDA, and without an nvcc the build stops. CUDA_HOME, TORCH_CUDA_ARCH_LIST,
MAX_JOBS and CXX have the same meaning as in PyTorch. AMP_EXT_KERNELS names a file: the library of
the kernels, which the first of several builds writes there, and the others take instead of
compiling it again. scripts/wheel.sh makes one wheel of such builds.
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
from typing import NoReturn

import setuptools

ROOT = Path(__file__).resolve().parent
INSTALL = (
    '    pip install torch "setuptools>=77,<82" ninja wheel && pip install --no-build-isolation .\n'
)

KERNELS, LIBRARY = "amp_ext.lib.libamp_ext_kernels", "amp_ext.lib.libamp_ext"
MODULE = "amp_ext._C"
# Folders whose sources are compiled one by one. All other sources are united into three files (for
# csrc/libtorch, for csrc/python, and for the rest), because PyTorch's headers take longer to
# compile than the sources.
ENGINES = ("csrc/cpu", "csrc/cuda")


def flags_of(kind: str) -> list[str]:
    """Returns the flags in ``csrc/<kind>_flags.txt``; ``kind`` is "cxx", "nvcc" or "link"."""
    lines = (ROOT / "csrc" / f"{kind}_flags.txt").read_text().splitlines()
    return [line for line in lines if line.startswith("-")]


def fail(message: str) -> NoReturn:
    """Ends the build with a message, which pip shows unchanged."""
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
    """Returns the first line that a command prints, or None if the command fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.partition("\n")[0]


def toolkit_of(nvcc: str) -> str | None:
    """Returns the folder of the toolkit that an ``nvcc`` belongs to, or None if it doesn't say.

    Asks ``nvcc`` for the folder, because ``nvcc`` on the PATH may be a wrapper script, and PyTorch
    would take the folder of the wrapper.
    """
    plan = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True
    )
    top = re.search(r"^#\$ TOP=(.+)$", plan.stderr, re.MULTILINE)
    return str(Path(top[1].strip()).resolve()) if top else None


@functools.cache
def toolkit_version(cuda_home: str) -> tuple[int, int]:
    """Returns major and minor version of a CUDA toolkit."""
    text = subprocess.run([f"{cuda_home}/bin/nvcc", "--version"], capture_output=True, text=True)
    release = re.search(r"release (\d+)\.(\d+)", text.stdout)
    if release is None:
        fail(f"{cuda_home}/bin/nvcc --version names no release.")
    return int(release[1]), int(release[2])


def find_cuda_home(needed: str) -> str:
    """Returns the folder of a CUDA toolkit with the major version of ``needed``, or ends the build.

    Looks at CUDA_HOME, the PATH, the compiler that pip installs, and the usual folder. pip installs
    it into site-packages, next to the libraries of CUDA that PyTorch needs, too.
    """
    major = int(needed.split(".")[0])
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if given := os.environ.get(name):
            wrong = "which has no bin/nvcc"
            if os.access(f"{given}/bin/nvcc", os.X_OK):
                version = toolkit_version(given)
                if version[0] == major:
                    return given
                wrong = f"a toolkit of CUDA {version[0]}.{version[1]}"
            fail(
                f"{name} is {given}, {wrong}. PyTorch {torch.__version__} uses CUDA {needed}:\n"
                f"set {name} to the folder of a CUDA toolkit of that major version, unset it, or\n"
                "set AMP_EXT_CUDA=0 to build for the CPU alone."
            )

    packages = importlib.util.find_spec("nvidia")
    folders = (packages and packages.submodule_search_locations) or []
    names = ["nvcc", *(f"{folder}/cu{major}/bin/nvcc" for folder in folders)]
    compilers = filter(None, map(shutil.which, [*names, "/usr/local/cuda/bin/nvcc"]))
    found = {folder: toolkit_version(folder) for folder in map(toolkit_of, compilers) if folder}
    for folder, version in found.items():
        if version[0] == major:
            return folder
    others = "".join(f", only {folder} of {a}.{b}" for folder, (a, b) in found.items())
    # The packages of CUDA 12 lie in several folders, where nvcc does not find its parts.
    cure = f"To install nvcc: pip install 'cuda-toolkit[nvcc,nvvm,cccl]=={needed}.*'"
    if major < 13:
        cure = f"Install the toolkit of CUDA {needed}, and set CUDA_HOME to its folder."
    fail(
        f"PyTorch {torch.__version__} has CUDA {needed}, but no nvcc of CUDA {major} was found"
        f"{others}.\n{cure}\nTo build for the CPU alone: set AMP_EXT_CUDA=0."
    )


def choose_cuda() -> bool:
    """Returns True to build the CUDA backend, and then sets environment variables for PyTorch."""
    choice = os.environ.get("AMP_EXT_CUDA", "")
    if choice not in ("", "0", "1"):
        fail(f"AMP_EXT_CUDA must be 0 or 1, got {choice!r}.")
    if choice == "0":
        return False

    if torch.version.cuda is None:
        if choice == "1":
            fail(f"AMP_EXT_CUDA=1, but PyTorch {torch.__version__} is built without CUDA.")
        return False
    cuda_home = find_cuda_home(torch.version.cuda)
    toolkit = toolkit_version(cuda_home)
    os.environ["CUDA_HOME"] = cuda_home
    if not os.environ.get("TORCH_CUDA_ARCH_LIST") and not torch.cuda.is_available():
        newest = ";10.0;12.0+PTX" if toolkit >= (12, 8) else "+PTX"
        os.environ["TORCH_CUDA_ARCH_LIST"] = f"7.5;8.0;8.6;9.0{newest}"
    return True


def numbers_in(file: Path) -> list[float]:
    """Returns the numbers in a file of a cgroup ("max" is inf), or [] if it does not exist."""
    words = file.read_text().split() if file.is_file() else []
    return [math.inf if word in ("max", "-1") else int(word) for word in words]


def limits_of_groups(root: Path) -> tuple[float, float]:
    """Returns the bytes of memory and the number of cores that cgroups allow; inf if unlimited.

    Args:
        root: The folder that contains ``proc`` and ``sys``.
    """
    memory = cores = math.inf
    listed = root / "proc/self/cgroup"
    for line in listed.read_text().splitlines() if listed.is_file() else ():
        _, controllers, path = line.split(":", 2)  # in cgroup v2, `controllers` is empty
        for controller in controllers.split(","):
            # Also reads the limits of this folder itself: in a container this folder may be the
            # cgroup of the process, while `path` is a path on the host.
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
    """Sets MAX_JOBS if it is not set: one job per core, and at least 2 GiB of memory per job."""
    memory, cores = limits_of_groups(root)
    memory = min(memory, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    jobs = max(1, int(min(len(os.sched_getaffinity(0)), cores, memory // 2**31)))
    os.environ.setdefault("MAX_JOBS", str(jobs))


with_cuda = choose_cuda()
bound_jobs()
# PyTorch looks for ninja on the PATH, but an environment that isn't activated is not on it.
os.environ["PATH"] += os.pathsep + sysconfig.get_path("scripts")

from setuptools.command import bdist_wheel  # noqa: E402

# Imported only here, because cpp_extension reads CUDA_HOME when it is imported.
from torch.utils import cpp_extension  # noqa: E402

define = ["-DAMP_EXT_WITH_CUDA=1"] if with_cuda else []
flags = {"cxx": flags_of("cxx") + define, "nvcc": flags_of("nvcc") + define if with_cuda else []}
if with_cuda and toolkit_version(os.environ["CUDA_HOME"]) >= (13, 0):
    # Compresses kernels to a sixth. Drivers that can't decompress them can't run CUDA 13 anyway.
    flags["nvcc"].append("--compress-mode=size")
own_include_dirs = [str(ROOT / "csrc"), str(ROOT / "csrc" / "include")]
device_type = "cuda" if with_cuda else "cpu"
include_dirs = own_include_dirs + cpp_extension.include_paths(device_type)
library_dirs = cpp_extension.library_paths(device_type)
torch_folder = str(Path(torch.__file__).parent)


def cuda_runtime() -> list[str]:
    """Returns the library of CUDA that the kernels need, as a name for the linker.

    The runtime that pip installs has no plain name, libcudart.so, so it is linked by its file name.
    """
    if not with_cuda:
        return []
    files = [file.name for folder in library_dirs for file in Path(folder).glob("libcudart.so*")]
    plain = "libcudart.so" in files or not files
    return ["cudart" if plain else f":{min(files)}"]


def run_paths(site_packages: str) -> list[str]:
    """Returns linker options with which a library finds PyTorch, and CUDA's runtime beside it."""
    found = [f"{site_packages}/torch/lib"]
    if with_cuda:  # the runtime that pip installs with PyTorch
        major = str(torch.version.cuda).split(".")[0]
        found.append(f"{site_packages}/nvidia/cu{major}/lib")
    return [f"-Wl,-rpath,{folder}" for folder in found]


# Keep this list equal to the sources in CMakeLists.txt.
core = glob("csrc/**/*.cpp", recursive=True)
core += glob("csrc/cuda/*.cu") if with_cuda else []
bindings = sorted(file for file in core if file.startswith("csrc/python"))
engines = sorted(file for file in core if file.startswith(ENGINES))
core = sorted(set(core) - set(bindings) - set(engines))
# The library of the kernels that builds for several releases of PyTorch share, or "".
shared_kernels = os.environ.get("AMP_EXT_KERNELS", "")


def architectures() -> list[str]:
    """Returns the GPU architectures of the library: sm_90 is machine code, compute_90 is PTX."""
    if not with_cuda:
        return []
    return sorted(set(re.findall(r",code=(\w+)", " ".join(cpp_extension._get_cuda_arch_flags()))))


def digest(*versions: str) -> str:
    """Returns a hash of the sources, flags and architectures of the build, and of ``versions``."""
    text = hashlib.sha256(json.dumps([versions, flags, architectures()]).encode())
    for folder in own_include_dirs:
        for file in sorted(file for file in Path(folder).rglob("*") if file.is_file()):
            text.update(file.read_bytes())
    return text.hexdigest()[:12]


def describe(build: str, version: str, torch_folder: str | None) -> dict[str, object]:
    """Returns a description of the build, for ``_build_info.json`` and ``amp_extBuild.cmake``.

    Args:
        build: The name of this build.
        version: The version of the package.
        torch_folder: The folder of PyTorch, or None if it will be installed next to the package.
    """
    gpus = range(torch.cuda.device_count())
    visible = {".".join(map(str, torch.cuda.get_device_capability(gpu))) for gpu in gpus}
    arch_list = os.environ.get("TORCH_CUDA_ARCH_LIST") or ";".join(sorted(visible))
    toolkit = "{}.{}".format(*toolkit_version(os.environ["CUDA_HOME"])) if with_cuda else None
    # This command prints the commit, with "-dirty" appended if files were changed.
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
    """Builds the libraries, the module that links them, and files that describe the build."""

    def run(self) -> None:
        """Builds all extensions, then writes ``_build_info.json`` and ``amp_extBuild.cmake``."""
        backends = "cpu and cuda" if with_cuda else "cpu"
        print(f"amp_ext: building {backends} for PyTorch {torch.__version__}")
        self.in_place = bool(self.inplace)  # a copy, because setuptools clears `inplace` in run()
        version = self.distribution.get_version().split("+")[0]  # without a local part: "+cu130"
        release = torch.__version__.split("+")[0]
        self.build_name = f"AMP_EXT_{version}_torch_{release}_{digest(torch.__version__)}"
        self.kernels_name = f"AMP_EXT_KERNELS_{version}_{digest()}"
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
        """Returns the file name of an extension, without a Python version for a library."""
        if fullname.split(".")[-1].startswith("lib"):
            return f"{fullname.replace('.', os.sep)}.so"
        return super().get_ext_filename(fullname)

    def build_extension(self, extension: setuptools.Extension) -> None:
        """Compiles the sources, unites some of them first, and completes the linker options."""
        kernels = Path(self.get_ext_fullpath(KERNELS))
        is_compiled = Path(shared_kernels).is_file()
        for of_compiler in extension.extra_compile_args.values():
            # No source uses TORCH_EXTENSION_NAME. Without it, all extensions have the same flags,
            # so that their sources can be compiled together.
            of_compiler[:] = [flag for flag in of_compiler if "TORCH_EXTENSION_NAME" not in flag]
        of_python = self.unite("python", bindings)
        libtorch = [file for file in core if file.startswith("csrc/libtorch")]
        longer = self.unite("libtorch", libtorch)
        shorter = self.unite("others", sorted(set(core) - set(libtorch)))
        if extension.name == KERNELS and self.use_ninja:
            # Compiles the sources of all extensions in one run of ninja, so that more sources are
            # compiled in parallel. The later runs of ninja then find nothing to do. The longest
            # compilation is first and the shortest last, so that all cores finish at about the
            # same time.
            self.compiler.compile(
                [of_python, longer, *([] if is_compiled else engines), shorter],
                output_dir=self.build_temp,
                include_dirs=extension.include_dirs,
                extra_postargs=extension.extra_compile_args,
            )
        if extension.name == KERNELS and is_compiled:
            kernels.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(shared_kernels, kernels)
            return
        sources = {KERNELS: engines, LIBRARY: [longer, shorter], MODULE: [of_python]}
        extension.sources = sources[extension.name]
        extension.library_dirs.insert(0, str(kernels.parent))
        if extension.name != MODULE:
            exports = Path(self.build_temp, f"{extension.name}.map")
            exports.parent.mkdir(parents=True, exist_ok=True)
            name = self.kernels_name if extension.name == KERNELS else self.build_name
            text = (ROOT / "csrc" / "exports.map.in").read_text()
            exports.write_text(text.replace("@AMP_EXT_BUILD@", name))
            extension.extra_link_args.append(f"-Wl,--version-script={exports}")
            if self.in_place:  # only in site-packages, PyTorch is next to the package
                extension.extra_link_args += run_paths(str(Path(torch_folder).parent))
        super().build_extension(extension)
        if extension.name == KERNELS and shared_kernels:
            shutil.copyfile(kernels, shared_kernels)

    def unite(self, name: str, files: list[str]) -> str:
        """Writes a source file that includes ``files``, if its text is new; returns its path."""
        united = Path(self.build_temp, "csrc", "united", f"{name}.cpp")
        text = "".join(f'#include "{ROOT / file}"\n' for file in files)
        if not united.is_file() or united.read_text() != text:
            united.parent.mkdir(parents=True, exist_ok=True)
            united.write_text(text)
        return str(united)

    def copy_extensions_to_source(self) -> None:
        """Creates the folder of the libraries, then copies the extensions to the sources."""
        Path(self.get_ext_fullpath(LIBRARY)).parent.mkdir(exist_ok=True)
        super().copy_extensions_to_source()


class BuildWheel(bdist_wheel.bdist_wheel):
    """Builds a wheel that requires the minor release of PyTorch that it was compiled against.

    An sdist and an editable install keep the requirement of pyproject.toml, because they compile
    for the PyTorch that they find.
    """

    def write_wheelfile(self, wheelfile_base: str, *arguments: object) -> None:
        """Writes the WHEEL file, and narrows the requirement of PyTorch in METADATA next to it."""
        if "bdist_wheel" in self.distribution.commands:  # not in an editable install
            # Edits METADATA, because a change of install_requires comes too late if pip has already
            # generated the metadata.
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


# A wheel for several releases of PyTorch has this library one folder deeper than it is built, in
# amp_ext/torch2.14/lib for example: scripts/merge_wheels.py.
deeper = ["-Wl,-rpath,$ORIGIN/../../lib", *run_paths("$ORIGIN/../../..")] if shared_kernels else []
kernels = setuptools.Extension(
    KERNELS,
    engines,
    include_dirs=include_dirs,
    library_dirs=library_dirs,
    libraries=cuda_runtime(),
    extra_compile_args=dict(flags),
    extra_link_args=[
        "-Wl,--as-needed",  # no OpenMP: torch's threads run the engines
        *flags_of("link"),
        "-Wl,-soname,libamp_ext_kernels.so",
        *run_paths("$ORIGIN/../.."),
    ],
)
library = setuptools.Extension(
    LIBRARY,
    core,
    include_dirs=include_dirs,
    library_dirs=library_dirs,
    libraries=["amp_ext_kernels", "c10", "torch_cpu", "torch"]
    + (["c10_cuda", "torch_cuda", *cuda_runtime()] if with_cuda else []),
    extra_compile_args=dict(flags),
    extra_link_args=[
        *flags_of("link"),
        "-Wl,-soname,libamp_ext.so",
        "-Wl,-rpath,$ORIGIN",
        *run_paths("$ORIGIN/../.."),
        *deeper,
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
    ext_modules=[kernels, library, module],
    cmdclass={"build_ext": BuildExtension, "bdist_wheel": BuildWheel},
)
