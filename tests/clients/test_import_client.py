"""A library that is missing, too old or too new is named before anything of it is used."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys

import pytest

from amp_ext.integrations import import_client


def pretend(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """Makes every library one of this version, or missing."""

    def version_of(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", version_of)


@pytest.mark.parametrize("version", [None, "0.99.1", "3.0.0.dev1", "unknown"])
@pytest.mark.parametrize(
    ("library", "limits"),
    [("accelerate", ">=1.10,<2"), ("lightning", ">=2.4,<3"), ("timm", ">=1.0.12,<2")],
)
def test_the_error_names_library_versions_and_cure(library, limits, version, monkeypatch):
    pretend(monkeypatch, version)
    wanted = f"{library}{limits}"
    needs = f"amp_ext.integrations.{library} needs {wanted}, found {version or 'none'}"
    monkeypatch.delitem(sys.modules, f"amp_ext.integrations.{library}", raising=False)
    with pytest.raises(ImportError) as caught:
        importlib.import_module(f"amp_ext.integrations.{library}")
    assert str(caught.value) == f'{needs}: pip install "{wanted}"'
    assert caught.value.name == library


@pytest.mark.parametrize("version", ["2.6", "2.6.0", "2.10.1rc1+cpu", "2.99"])
def test_a_version_within_the_limits_will_do(version, monkeypatch):
    pretend(monkeypatch, version)
    assert import_client("pytest", at_least="2.6", below="3") is pytest


@pytest.mark.parametrize("version", ["2.5.9", "3", "3.0.0"])
def test_limits_are_compared_number_by_number(version, monkeypatch):
    pretend(monkeypatch, version)
    with pytest.raises(ImportError, match=f"needs pytest>=2.6,<3, found {version}"):
        import_client("pytest", at_least="2.6", below="3")


@pytest.mark.slow
def test_the_package_imports_no_client():
    program = (
        "import sys, amp_ext, amp_ext.integrations; "
        "print([name for name in ('accelerate', 'lightning', 'timm') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "[]\n"
