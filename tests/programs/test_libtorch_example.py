"""The photograph that a program in C++ learns: its bits and picture beside photo.py's."""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import HANGS
from torch import Tensor

pytest.importorskip("matplotlib")
np = pytest.importorskip("numpy")
image = pytest.importorskip("PIL.Image")

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
BUILD = ROOT / "build" / "libtorch"  # where `make demo-cpp` builds it, too
# With such a divisor the scale overflows soon, so that there are skipped steps.
SMALL = ["--quick", "--tiles=1"]
STEPS, PART = 120, 47  # amid the steps that the scale counts before it doubles

pytestmark = pytest.mark.slow

Program = Callable[..., subprocess.CompletedProcess[str]]


def run(*command: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=HANGS)


@pytest.fixture(scope="module")
def photo(run_module) -> Callable[..., str]:
    def photo(*options: Any) -> str:
        done = run_module("photo", "--device=cpu", *map(str, options), folder=EXAMPLES)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return photo


@pytest.fixture(scope="module")
def train(build_program) -> Program:
    """Runs the program, which is built as `make demo-cpp` builds it."""
    build_program(EXAMPLES / "libtorch", BUILD, "Release")
    return lambda *arguments: run(BUILD / "train", *arguments)


@pytest.fixture(scope="module")
def folder(photo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two starts of the same run: of all its steps, and of the first of them."""
    folder = tmp_path_factory.mktemp("libtorch")
    photo(*SMALL, "--steps", STEPS, "--write-start", folder / "start.pt")
    start = torch.load(folder / "start.pt", weights_only=True)
    torch.save(start | {"steps": PART}, folder / "start_of_part.pt")
    return folder


@pytest.fixture(scope="module")
def whole(train: Program, folder: Path) -> str:
    """Trains in C++; returns what is printed. Leaves ``whole.pt`` and ``whole.ppm``."""
    outputs = ("--checkpoint", folder / "whole.pt", "--picture", folder / "whole.ppm")
    done = train(folder / "start.pt", *outputs)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def content(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of an archive of C++: of the model, states and curves."""
    module = torch.jit.load(path)
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def psnr_of(picture: Path, start: Path) -> float:
    learned = np.asarray(image.open(picture), dtype=np.float32) / 255
    wanted = torch.load(start, weights_only=True)["photo"].numpy()
    return -10 * math.log10(((learned - wanted) ** 2).mean())


def psnr_in(text: str) -> float:
    (found,) = re.findall(r"the picture: PSNR (\S+) dB", text)
    return float(found)


def test_it_trains_with_the_bits_of_python(photo, folder, whole):
    printed = photo(*SMALL, "--steps", STEPS, "--checkpoint", folder / "py.pt", "--out", folder)
    mine, theirs = content(folder / "whole.pt"), torch.load(folder / "py.pt", weights_only=True)
    for name, weight in theirs["model"].items():
        assert torch.equal(mine[f"model.{name}"], weight), name
    losses, scales, skipped, _ = theirs["extra"]["curves"]
    curves = [mine[name].tolist() for name in ("losses", "scales", "skipped")]
    assert curves == [losses, scales, skipped]
    assert psnr_in(whole) == float(re.search(r"fp16 amp_ext .* fp32 +(\S+)", printed)[1])
    assert len(losses) == STEPS
    steps = re.findall(r"step +(\d+) .* skipped: a gradient", whole)
    assert [int(step) - 1 for step in steps] == skipped != []


def test_it_resumes_with_the_same_bits(train, folder, whole):
    part, rest = folder / "part.pt", folder / "rest.pt"
    assert train(folder / "start_of_part.pt", "--checkpoint", part).returncode == 0
    done = train(folder / "start.pt", "--resume", part, "--checkpoint", rest)
    assert (done.returncode, done.stderr) == (0, "")
    mine, wanted = content(rest), content(folder / "whole.pt")
    assert mine.keys() == wanted.keys()
    assert [name for name in mine if not torch.equal(mine[name], wanted[name])] == []


def test_the_picture_is_the_one_that_it_measured(folder, whole):
    with image.open(folder / "whole.ppm") as picture:
        assert (picture.format, picture.mode, picture.size) == ("PPM", "RGB", (32, 32))
    # Nothing is lost but by rounding to 8 bits.
    assert abs(psnr_of(folder / "whole.ppm", folder / "start.pt") - psnr_in(whole)) < 0.1
