"""Unites wheels of amp_ext for several releases of PyTorch into one: scripts/wheel.sh.

    python scripts/merge_wheels.py FOLDER WHEEL WHEEL ...

Writes the wheel into FOLDER, and prints its path and what it requires of PyTorch. The wheels are
builds of the same sources for one Python, with one library of the kernels (AMP_EXT_KERNELS of
setup.py). What was compiled for a release of PyTorch moves to a folder of its own, for example
amp_ext/torch2.14, from which amp_ext/binary.py and amp_extConfig.cmake choose. All other files are
the same in all wheels.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

COMPILED = ("_C.*.so", "lib/libamp_ext.so", "_build_info.json")
NOTE = Path("share", "cmake", "amp_ext", "amp_extBuild.cmake")
TORCH_OF_NOTE = r'(?m)^set\(amp_ext_TORCH_VERSION "(.*)"\)'


def minor_of(version: str) -> tuple[int, int]:
    """Returns the major and minor number of a version."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def requirement(versions: Sequence[str]) -> str:
    """Returns the releases of PyTorch that have a build: ``torch>=2.13,<2.16``."""
    minors = sorted(map(minor_of, versions))
    (major, first), (_, last) = minors[0], minors[-1]
    between = {(major, minor) for minor in range(first, last)}
    left_out = "".join(f",!={major}.{minor}.*" for _, minor in sorted(between - set(minors)))
    return f"torch>={major}.{first},<{major}.{last + 1}{left_out}"


def move_compiled(package: Path, united: Path) -> str:
    """Moves the compiled files of a package into ``united``; returns the version of its PyTorch."""
    torch = json.loads((package / "_build_info.json").read_text())["torch"]
    folder = united / "torch{}.{}".format(*minor_of(torch))
    if folder.exists():
        sys.exit(f"merge_wheels.py: two wheels are for PyTorch {folder.name[5:]}")
    for pattern in COMPILED:
        (file,) = package.glob(pattern)
        target = folder / file.relative_to(package)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(file, target)
    return torch


def unite(wheels: Sequence[Path], out: Path, work: Path) -> tuple[Path, str]:
    """Unites the wheels, unpacked in ``work``; returns the wheel in ``out`` and its requirement."""
    folders = []
    for index, wheel in enumerate(wheels):
        folders.append(work / str(index))
        with zipfile.ZipFile(wheel) as file:
            file.extractall(folders[-1])
    united = folders[0] / "amp_ext"
    versions = [move_compiled(folder / "amp_ext", united) for folder in folders]
    for folder in folders[1:]:
        for file in (folder / "amp_ext").rglob("*"):
            same = united / file.relative_to(folder / "amp_ext")
            if file.is_file() and file.name != NOTE.name and file.read_bytes() != same.read_bytes():
                sys.exit(f"merge_wheels.py: the wheels differ in {same.relative_to(united)}")

    out.mkdir(exist_ok=True)
    note = united / NOTE
    text, count = re.subn(
        TORCH_OF_NOTE, f'set(amp_ext_TORCH_VERSION "{";".join(versions)}")', note.read_text()
    )
    note.write_text(text)
    (metadata,) = folders[0].glob("*.dist-info/METADATA")
    text, narrowed = re.subn(
        r"(?m)^Requires-Dist: torch==.*$",
        f"Requires-Dist: {requirement(versions)}",
        metadata.read_text(),
    )
    metadata.write_text(text)
    assert (count, narrowed) == (1, 1)
    command = [sys.executable, "-m", "wheel", "pack", folders[0], "--dest-dir", out]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    return max(out.glob("*.whl"), key=lambda file: file.stat().st_mtime), requirement(versions)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        print(*unite(list(map(Path, sys.argv[2:])), Path(sys.argv[1]), Path(work)))
