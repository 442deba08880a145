"""A library that is missing, too old or too new is named before anything of it is used."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys

import pytest

from amp_ext.integrations import import_client

LIBRARIES = {"accelerate": ">=1.10,<2", "lightning": ">=2.4,<3", "timm": ">=1.0.12,<2"}


@pytest.fixture
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """What every library says is its version, or None where it is missing."""

    def version_of(name: str) -> str:
        if request.param is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return request.param

    monkeypatch.setattr(importlib.metadata, "version", version_of)
    return request.param


@pytest.mark.parametrize("version", [None, "0.99.1", "3.0.0.dev1", "unknown"], indirect=True)
@pytest.mark.parametrize(("library", "limits"), LIBRARIES.items())
def test_the_error_names_library_versions_and_cure(library, limits, version, monkeypatch):
    wanted = f"{library}{limits}"
    needs = f"amp_ext.integrations.{library} needs {wanted}, found {version or 'none'}"
    monkeypatch.delitem(sys.modules, f"amp_ext.integrations.{library}", raising=False)
    with pytest.raises(ImportError) as caught:
        importlib.import_module(f"amp_ext.integrations.{library}")
    assert str(caught.value) == f'{needs}: pip install "{wanted}"'
    assert caught.value.name == library


@pytest.mark.parametrize("version", ["2.6", "2.6.0", "2.10.1rc1+cpu", "2.99"], indirect=True)
def test_a_version_within_the_limits_will_do(version):
    assert import_client("pytest", at_least="2.6", below="3") is pytest


@pytest.mark.parametrize("version", ["2.5.9", "3", "3.0.0"], indirect=True)
def test_limits_are_compared_number_by_number(version):
    with pytest.raises(ImportError, match=f"needs pytest>=2.6,<3, found {version}"):
        import_client("pytest", at_least="2.6", below="3")


@pytest.mark.slow
def test_the_package_imports_no_client(run_module, tmp_path):
    program = f"import sys, amp_ext.integrations\nprint({set(LIBRARIES)} & sys.modules.keys())"
    (tmp_path / "look.py").write_text(program)
    assert run_module("look", folder=tmp_path).stdout == "set()\n"
