#!/usr/bin/env bash
# Builds the source distribution, installs it into an empty folder and uses it from elsewhere.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath --no-symlinks "${PYTHON:-.venv/bin/python}")

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
"$python" -c 'import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])' \
  "$out" > "$out/log" 2>&1 || { cat "$out/log" >&2; exit 1; }
"$python" -m pip install -qq --disable-pip-version-check --no-build-isolation --no-deps \
  --target "$out/site" "$out"/*.tar.gz
cd "$out"
PYTHONPATH=site "$python" - << 'END'
import importlib.metadata, json, pathlib, tarfile
import torch, amp_ext
from amp_ext import cmake, ops

folder = pathlib.Path(amp_ext.__file__).parent
assert folder.parent.name == "site", folder
assert importlib.metadata.version("amp-ext") == amp_ext.__version__
assert json.loads((folder / "_build_info.json").read_text())["torch"] == torch.__version__
# The sources fit any PyTorch, what was built from them fits one.
(archive,) = pathlib.Path().glob("*.tar.gz")
with tarfile.open(archive) as files:
    (of_sources,) = (name for name in files.getnames() if name.count("/") == 1 and "PKG-INFO" in name)
    assert b"\nRequires-Dist: torch>=2.11\n" in files.extractfile(of_sources).read()
minor = ".".join(torch.__version__.split(".")[:2])
assert f"torch=={minor}.*" in importlib.metadata.requires("amp-ext")
for name in ("py.typed", "_C.pyi", "lib/libamp_ext.so", "include/amp_ext/ops.h"):
    assert (folder / name).is_file(), name
for name in ("Config", "ConfigVersion", "Build"):
    assert (cmake.folder() / f"amp_ext{name}.cmake").is_file(), name
assert not list(folder.glob("lib/*.cpython-*")), "the library has a name without a version of Python"

param = torch.ones(3, requires_grad=True)
param.grad = torch.ones(3)
amp_ext.optim.Adam([param], lr=0.5).step()
torch.testing.assert_close(param.detach(), torch.full((3,), 0.5))
print("installed from the source distribution; one Adam step is right")
END
