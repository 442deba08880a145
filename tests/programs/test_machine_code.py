"""The check of the machine code of CUDA kernels refuses what makes them slow."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "scripts" / "check_machine_code.py"
CHECK = runpy.run_path(str(SCRIPT))


# What nvdisasm prints: a loop over packs within one over tensors, and one over single elements.
LISTING = """
.text._Z4stepPf:
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_0:
        /*0010*/                   LDG.E R9, desc[UR4][R2.64] ;
.L_x_1:
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/                   LDG.E.128 R12, desc[UR4][R2.64+0x1000] ;
        /*0040*/              @!P1 BRA `(.L_x_3) ;
        /*0050*/                   FMUL R4, R4, R8 ;
.L_x_3:
        /*0060*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*0070*/               @P0 BRA `(.L_x_1) ;
        /*0080*/               @P2 BRA `(.L_x_0) ;
        /*0090*/               @P3 EXIT ;
        /*00a0*/                   CALL.REL.NOINC `($division) ;
.L_x_2:
        /*00b0*/                   LDG.E R5, desc[UR4][R2.64] ;
        /*00c0*/                   STG.E desc[UR4][R2.64], R5 ;
        /*00d0*/               @P0 BRA `(.L_x_2) ;
        /*00e0*/                   EXIT ;
.L_x_4:
        /*00f0*/                   BRA `(.L_x_4);
"""


def faults_of(table: str, listing: str = LISTING, **described: object) -> list[str]:
    """Returns what is wrong with the kernel of a listing, as ptxas would describe it."""
    (kernel,) = CHECK["parse"](listing, "sm_90")
    for name, value in {"registers": 64, **described}.items():
        setattr(kernel, name, value)
    return CHECK["check"]([kernel], CHECK["read_table"](table))


ROW = "step* | sm_9? | 4 | 1"
SINGLE = "        /*00b0*/                   LDG.E R5, desc[UR4][R2.64] ;\n"


def test_a_kernel_that_does_what_its_row_says_has_no_fault():
    assert faults_of(ROW) == []
    # A word to other blocks is no access to a tensor.
    to_blocks = SINGLE.replace("LDG.E R5", "LDG.E.64.STRONG.SYS R5") * 4
    assert faults_of(ROW, LISTING.replace(SINGLE, SINGLE + to_blocks)) == []


@pytest.mark.parametrize(
    ("table", "described", "wanted"),
    [
        ("step* | * | 5 | 1", {}, "64 registers allow 4 blocks on a multiprocessor, not 5"),
        (ROW, {"spills": 16}, "spills 16 bytes"),
        (ROW, {"stack": 16}, "16 bytes of stack"),
        (ROW, {"is_fast": True, "spills": 52}, "spills 52 bytes"),
        ("step* | * | 4 | 2", {}, "128 bits are moved at once in 1 innermost loops, not in 2"),
        ("look* | * | 4 | 1\nstep* | sm_80 | 4 | 1", {}, "no row of the table has this kernel"),
    ],
    ids=["blocks", "spills", "stack", "fast", "loops", "no-row"],
)
def test_less_than_the_row_says_is_refused(table, described, wanted):
    (fault,) = faults_of(table, **described)
    assert wanted in fault


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        ("LDG.E.128 R12", "LDG.E.64 R12", "less than 128 bits at once: LDG.E.64"),
        ("FMUL R4, R4, R8", "LDL R4, [R1]", "a loop uses local memory: LDL"),
    ],
    ids=["narrow", "local"],
)
def test_a_slow_instruction_in_a_loop_is_refused(before, after, wanted):
    assert before in LISTING
    (fault,) = faults_of(ROW, LISTING.replace(before, after))
    assert wanted in fault


def test_the_fast_path_may_load_one_constant_in_a_loop_and_store_nothing_in_local_memory():
    def loop_with(*codes: str) -> str:
        return LISTING.replace("FMUL R4, R4, R8", " ;\n/*0050*/ ".join(codes))

    load, store = "LDL R4, [R1]", "STL [R1], R4"
    assert faults_of(ROW, loop_with(load), is_fast=True) == []
    for codes in ([store], [load, load], [load, store]):
        (fault,) = faults_of(ROW, loop_with(*codes), is_fast=True)
        assert "a loop uses local memory" in fault


def test_a_called_function_does_not_hide_what_its_caller_spills():
    (kernel,) = CHECK["parse"](LISTING, "sm_90")
    log = """Compiling entry function '_Z4stepPf' for 'sm_90'
Function properties for _Z4stepPf
    8 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
Used 64 registers
Function properties for _Z7dividedf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"""
    CHECK["read_log"](log, {(kernel.symbol, "sm_90"): kernel})
    assert (kernel.registers, kernel.stack, kernel.spills) == (64, 8, 12)
