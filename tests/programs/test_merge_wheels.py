"""Wheels for several releases of PyTorch become one, which asks for these releases."""

from __future__ import annotations

import json
import runpy
import zipfile
from pathlib import Path
from typing import Any

import pytest
from harness.rows import rows

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "merge_wheels.py"))


REQUIREMENTS = {
    "one": (["2.13.0"], "torch>=2.13,<2.14"),
    "neighbours": (["2.13.0+cpu", "2.14.1", "2.15.0"], "torch>=2.13,<2.16"),
    "one-is-left-out": (["2.15.0", "2.13.0"], "torch>=2.13,<2.16,!=2.14.*"),
}


@pytest.mark.parametrize(("versions", "asked"), rows(REQUIREMENTS))
def test_a_wheel_asks_for_the_releases_inside(script, versions, asked):
    assert script["requirement"](versions) == asked


def make_wheel(folder: Path, torch: str, **changed: str) -> Path:
    """Makes a wheel of small files, as a build for one PyTorch has them."""
    folder.mkdir()
    wheel = folder / "amp_ext-1.0+cpu-cp311-cp311-linux_x86_64.whl"
    files = {
        "amp_ext/__init__.py": "the same",
        "amp_ext/_C.cpython-311.so": f"module for {torch}",
        "amp_ext/lib/libamp_ext.so": f"library for {torch}",
        "amp_ext/lib/libamp_ext_kernels.so": "kernels",
        "amp_ext/_build_info.json": json.dumps({"torch": torch}),
        "amp_ext/share/cmake/amp_ext/amp_extBuild.cmake": f'set(amp_ext_TORCH_VERSION "{torch}")',
        "amp_ext-1.0+cpu.dist-info/METADATA": "Metadata-Version: 2.4\nName: amp-ext\n"
        f"Version: 1.0+cpu\nRequires-Dist: torch=={torch[:4]}.*\nRequires-Dist: numpy\n",
        "amp_ext-1.0+cpu.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: false\n"
        "Tag: cp311-cp311-linux_x86_64\n",
        "amp_ext-1.0+cpu.dist-info/RECORD": "",
        **changed,
    }
    with zipfile.ZipFile(wheel, "w") as file:
        for name, text in files.items():
            file.writestr(name, text)
    return wheel


def test_each_release_has_its_build_in_a_folder_and_the_rest_is_there_once(script, tmp_path):
    pytest.importorskip("wheel")
    versions = ["2.13.0+cpu", "2.14.1"]
    wheels = [make_wheel(tmp_path / version, version) for version in versions]
    wheel, asked = script["unite"](wheels, tmp_path / "dist", tmp_path / "work")
    assert asked == "torch>=2.13,<2.15"
    assert wheel == tmp_path / "dist" / "amp_ext-1.0+cpu-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(wheel) as file:
        files = {name: file.read(name).decode() for name in file.namelist()}
    for version in versions:
        folder = f"amp_ext/torch{version[:4]}"
        assert files.pop(f"{folder}/_C.cpython-311.so") == f"module for {version}"
        assert files.pop(f"{folder}/lib/libamp_ext.so") == f"library for {version}"
        assert json.loads(files.pop(f"{folder}/_build_info.json")) == {"torch": version}
    note = files.pop("amp_ext/share/cmake/amp_ext/amp_extBuild.cmake")
    assert note == 'set(amp_ext_TORCH_VERSION "2.13.0+cpu;2.14.1")'
    info = "amp_ext-1.0+cpu.dist-info"
    assert f"Requires-Dist: {asked}\nRequires-Dist: numpy\n" in files.pop(f"{info}/METADATA")
    assert "amp_ext/torch2.14/lib/libamp_ext.so,sha256=" in files.pop(f"{info}/RECORD")
    assert files.keys() == {
        "amp_ext/__init__.py",
        "amp_ext/lib/libamp_ext_kernels.so",
        f"{info}/WHEEL",
    }


def test_wheels_of_other_sources_kernels_or_of_one_release_are_refused(script, tmp_path):
    first = make_wheel(tmp_path / "first", "2.13.0")
    kernels = {"amp_ext/lib/libamp_ext_kernels.so": "others"}
    differs = make_wheel(tmp_path / "second", "2.14.0", **kernels)
    for other, told in ((differs, "differ in lib/libamp_ext_kernels.so"), (first, "PyTorch 2.13")):
        with pytest.raises(SystemExit, match=told):
            script["unite"]([first, other], tmp_path, tmp_path / f"work {told}")
