#!/usr/bin/env bash
# Builds the extension with CPU and CUDA backends against a CUDA PyTorch, from the source distribution,
# and runs the tests that need no GPU. Checks the machine code for sm_90, as compile_kernels.sh does for
# other architectures. All files are in .venv-torch/<version of PyTorch>; the checkout's build is unchanged.
#
#   TORCH=2.11.0        version of PyTorch; its environment (several GB) is created if it is missing
#   BASE_PYTHON=python  Python that creates the environment (Python 3.12 if found, else python3)
#   arguments           are passed to pytest
#
# Ends at once if csrc/, the public headers, setup.py and this script are unchanged since it last passed.
# The exit code is 3 if this machine's CUDA toolkit can't build for that PyTorch; nothing is tested then.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/own_environment.sh

torch=${TORCH:-2.11.0}
tests=$PWD/tests

fail() {
  echo "cuda_build.sh: $1" >&2
  exit "${2:-1}"
}

build() {
  copy_sources "$home/source"
  export AMP_EXT_CUDA=1 TORCH_CUDA_ARCH_LIST='9.0+PTX'
  # Keeps nvcc's files between builds, because unchanged sources are not compiled again.
  local code=$PWD/$home/machine_code
  mkdir -p "$code"
  export NVCC_APPEND_FLAGS="--keep --keep-dir $code -Xptxas -v"
  (cd "$home/source" && "$python" setup.py --name) > "$home/build.log" 2>&1 || {
    cat "$home/build.log" >&2
    fail "PyTorch $torch can't be tested on this machine" 3
  }
  install_copy
  cat "$home/build.log" >> "$code/build.log"
  "$python" scripts/check_machine_code.py "$code"
}

check() {
  CUDA_VISIBLE_DEVICES='' "$python" -I - "$torch" "$home/source" << 'END'
import importlib.metadata, json, pathlib, shutil, subprocess, sys
import torch, amp_ext
from amp_ext import cmake, ops
from torch._subclasses.fake_tensor import FakeTensorMode

folder = pathlib.Path(amp_ext.__file__).parent
assert folder.is_relative_to(sys.prefix), folder
assert importlib.metadata.version("amp-ext") == amp_ext.__version__
# The sdist supports several releases of PyTorch; the built package supports one.
assert "\nRequires-Dist: torch>=2.11\n" in pathlib.Path(sys.argv[2], "PKG-INFO").read_text()
minor = ".".join(torch.__version__.split(".")[:2])
assert f"torch=={minor}.*" in importlib.metadata.requires("amp-ext")
libraries = ("lib/libamp_ext.so", "lib/libamp_ext_kernels.so")
for name in ("py.typed", "_C.pyi", *libraries, "include/amp_ext/ops.h"):
    assert (folder / name).is_file(), name
for name in ("Config", "ConfigVersion", "Build"):
    assert (cmake.folder() / f"amp_ext{name}.cmake").is_file(), name
assert not list(folder.glob("lib/*.cpython-*")), "the library has a name without a version of Python"

info = json.loads((folder / "_build_info.json").read_text())
assert torch.__version__.split("+")[0] == sys.argv[1].split("+")[0], torch.__version__
assert info["torch"] == torch.__version__, info
assert info["cuda"] == torch.version.cuda, info
assert info["python"] == ".".join(map(str, sys.version_info[:3])), info
assert info["backends"] == ["cpu", "cuda"], info
assert info["arch_list"] == ["9.0+PTX"], info
assert info["architectures"] == ["compute_90", "sm_90"], info
print(f"built for torch {info['torch']}, CUDA {info['cuda']}, Python {info['python']}")

# Triton, which PyTorch installs, has a cuobjdump.
found = shutil.which("cuobjdump") or next(pathlib.Path(sys.prefix).rglob("bin/cuobjdump"), None)
if found is None:
    print("no cuobjdump: the architectures in the library were not looked at")
else:
    library = folder / "lib" / "libamp_ext_kernels.so"
    count = {}
    for kind in ("elf", "ptx"):
        listed = subprocess.run([found, f"--list-{kind}", library], capture_output=True, check=True)
        names = [line.split()[-1] for line in listed.stdout.decode().splitlines() if line]
        assert names and all("sm_90" in name for name in names), names
        count[kind] = len(names)
    assert count["elf"] == count["ptx"], count
    print(f"the library of the kernels, {library.stat().st_size >> 20} MiB, has {count} for sm_90")

assert not torch.cuda.is_available()
# A fake CUDA tensor, which has no memory, is refused with an error and does not crash.
with FakeTensorMode():
    fake = torch.ones(3, device="cuda")
try:
    ops.sgd_([fake], [fake], lr=0.1)
except RuntimeError as error:
    assert str(error).startswith("sgd_: params[0] must be "), error
    print(f"a fake one: {error}")
else:
    raise AssertionError("a step of a tensor without memory")
END
}

# Runs the quick CPU tests and those of the installed package, such as a program in C++, with the binary that also
# has CUDA kernels. Leaves out tests of the CPU engine's results, bits and errors, since all builds have the same
# engine, and tests of the checkout itself.
run_tests() {
  cd "$home"
  "$python" -m pytest "$tests"/programs/test_{cmake,import,info}.py -q -rfE -p no:cacheprovider
  "$python" -m pytest "$tests" -q -rfE -p no:cacheprovider -m 'not slow' -k 'not emulat' \
    --ignore="$tests"/{kernels,state_machine} --ignore="$tests"/programs/test_{cmake,import,info,update_errors}.py \
    --ignore="$tests"/ops/test_{steps,gradient_operations}.py --ignore="$tests"/optim/test_forms.py \
    --ignore-glob="$tests"/programs/test_{bench,docs,scripts,setup}'*.py' "$@"
}

make_torch_environment "$torch"
digest="$torch $(digest_of csrc amp_ext/{include,share} tests/cpp setup.py scripts/{cuda_build,own_environment}.sh scripts/{check_machine_code.py,machine_code.txt})"
if [ "$(cat "$home/.passed" 2> /dev/null)" = "$digest" ]; then
  echo "the CUDA build for PyTorch $torch is as it was when it passed ($home)"
  exit
fi
rm -f "$home/.passed"
echo "Building for PyTorch $torch, sm_90 and PTX (log: $home/build.log)"
build
check
(run_tests "$@")
echo "$digest" > "$home/.passed"
echo "passed for PyTorch $torch in $SECONDS s"
