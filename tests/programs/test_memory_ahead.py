"""Whether CPU kernels ask for memory ahead: by the processor, or as the environment wants it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from cuda_emulator import build

STEPS = """
import os, torch

for wanted in ("0", "1", "on"):
    if os.fork():  # a process reads the variable once
        os.wait()
        continue
    os.environ["AMP_EXT_CPU_PREFETCH"] = wanted
    from amp_ext import ops
    param, grad = torch.ones(70_000), torch.arange(70_000.0)
    ops.sgd_([param], [grad], lr=0.1, max_grad_norm=1.0)
    print(param.double().sum().item().hex())
    break
"""


@pytest.mark.slow
def test_the_vendor_decides_unless_the_variable_does(tmp_path):
    source, program = Path(__file__).with_name("processor.cpp"), tmp_path / "program"
    build.run([build.CXX, *build.FLAGS, str(source), "-o", str(program)])
    done = subprocess.run([program], stdout=subprocess.PIPE, text=True, check=True)
    *rules, vendor = done.stdout.split("\n")[:-1]
    # Not set, empty, 0, 1 and "on"; of Intel, AMD, and a processor that does not say.
    assert rules == ["yyny?", "nnny?", "yyny?"]
    cpuinfo = Path("/proc/cpuinfo").read_text()
    assert vendor in cpuinfo if "vendor_id" in cpuinfo else vendor == ""


@pytest.mark.slow
def test_bits_do_not_depend_on_it_and_other_values_are_refused(run_module, tmp_path):
    (tmp_path / "steps.py").write_text(STEPS)
    done = run_module("steps", folder=tmp_path)
    without, with_it = done.stdout.split()
    assert without == with_it
    assert "AMP_EXT_CPU_PREFETCH must be 0 or 1, got on" in done.stderr
