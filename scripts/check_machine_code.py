"""Checks the machine code of the CUDA kernels for patterns that make them slow.

    python scripts/check_machine_code.py FOLDER

``FOLDER`` has, for each source and architecture, the machine code in ``NAME.sm_90.cubin``, or in
``NAME.compute_90.cubin`` as ``nvcc --keep`` calls it, and the output of ``ptxas -v`` in ``*.log``.
The table ``machine_code.txt`` next to this script lists the requirements of each kernel. The exit
code is 1 if a kernel does not meet them.

A loop is a strongly connected set of basic blocks; an innermost loop contains no other loop. The
main loops of a kernel are the innermost loops in which a thread moves 128 bits at once. If a kernel
has fewer main loops than the table says, the compiler has narrowed the accesses of a loop. In a
main loop, each access to global memory must have 128 bits, except one load and one store of each
8-bit array (residuals, codes, exponents). No innermost loop may access local memory (spilled
registers), except that the fast path of a step may load one constant that has no register. Around
its loops, which a thread enters once per tile, a kernel may save a few registers.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import networkx

TABLE = Path(__file__).with_name("machine_code.txt")

# Limits of a multiprocessor, the same for all architectures that are compiled here.
REGISTERS = 65536
THREADS = 2048
REGISTERS_AT_ONCE = 256  # granularity in which a warp allocates registers

# Bytes that a thread may store and load around the loops of the fast path, and of other kernels.
SPILLS_OF_FAST_PATH, SPILLS_OF_OTHERS = 48, 12

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(?:(@!?U?P\w+)\s+)?([\w.]+)\s*(.*?)\s*;")
LABEL = re.compile(r"^(\.L_\w+):")
TARGET = re.compile(r"`\((\.L_\w+)\)")
WIDTH = re.compile(r"\.[US]?(8|16|64|128|256)\b")
ENDS = ("BRA", "EXIT", "RET", "BRX", "JMP")


@dataclass
class Instruction:
    """One line of machine code."""

    predicate: str | None
    opcode: str
    target: str | None

    @property
    def name(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def is_access(self) -> bool:
        """Whether the instruction accesses a tensor. "STRONG" marks values that blocks share."""
        return self.name in ("LDG", "LD", "STG", "ST") and "STRONG" not in self.opcode

    @property
    def is_wide(self) -> bool:
        """Whether the instruction loads or stores at least 128 bits of a tensor at once."""
        width = WIDTH.search(self.opcode)
        return self.is_access and width is not None and int(width[1]) >= 128

    @property
    def is_local(self) -> bool:
        return self.name in ("LDL", "STL")


@dataclass
class Kernel:
    """The machine code of a kernel, and the resources that it uses."""

    symbol: str
    name: str
    architecture: str
    code: list[Instruction]
    labels: dict[str, int]
    registers: int = 0
    stack: int = 0
    spills: int = 0
    threads: int = 256
    arrays_of_bytes: int = 0
    is_fast: bool = False
    loops: list[list[Instruction]] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        """Number of blocks that fit on a multiprocessor at once."""
        of_warp = -(-self.registers * 32 // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE
        return min(REGISTERS // (of_warp * self.threads // 32), THREADS // self.threads)

    def main_loops(self) -> list[list[Instruction]]:
        return [loop for loop in self.loops if any(each.is_wide for each in loop)]


def innermost(graph: networkx.DiGraph, blocks: set[int]) -> Iterator[set[int]]:
    """Yields the innermost loops. Removes the entry blocks of outer loops to find inner ones."""
    for loop in networkx.strongly_connected_components(graph.subgraph(blocks)):
        first = min(loop)
        if len(loop) == 1 and not graph.has_edge(first, first):
            continue
        # The endless loop after the end of a kernel has no entry block, so remove its first block.
        entry = min((each for each in loop if not loop.issuperset(graph.pred[each])), default=first)
        yield from list(innermost(graph, loop - {entry})) or [loop]


def loops_of(code: list[Instruction], labels: dict[str, int]) -> list[list[Instruction]]:
    """Returns the instructions of each innermost loop, in program order."""
    behind_branches = [i + 1 for i, each in enumerate(code) if each.name in ENDS]
    starts = sorted({0, *behind_branches, *labels.values()} - {len(code)})
    ends = dict(zip(starts, [*starts[1:], len(code)], strict=True))  # maps starts of blocks to ends
    graph = networkx.DiGraph([(-1, 0)])  # -1 stands for the launch, which enters the first block
    graph.add_nodes_from(starts)
    for start, end in ends.items():
        last = code[end - 1]
        # A call adds no edge to its target, because the target is not part of the calling loop.
        if last.name == "BRA" and last.target:
            graph.add_edge(start, labels[last.target])
        if end in ends and (last.name not in ENDS or last.predicate is not None):
            graph.add_edge(start, end)
    return [
        [each for start in sorted(loop) for each in code[start : ends[start]]]
        for loop in innermost(graph, set(starts))
    ]


def stored_in(buffers: list[str], computed: str) -> str:
    """Returns the number format of the buffers, or ``computed`` if there are no buffers."""
    if any(kind.startswith("Blockwise") for kind in buffers):
        return "8bit"
    if "Ratio" in buffers:
        return "8bit-bf16"
    return buffers[0].removeprefix("Plain<").removesuffix(">") if buffers else computed


def name_of(signature: str) -> tuple[str, int, int]:
    """Parses the demangled signature of a kernel.

    Returns:
        A short name, the threads per block, and the number of 8-bit arrays that the kernel loads
        and stores, whose accesses have fewer than 128 bits.
    """
    text = re.sub(r"amp_ext::|cuda::|\(anonymous namespace\)::", "", signature)
    shape = re.search(r"\bShape<(\d+)", text)
    threads = int(shape[1]) if shape else 256
    buffer = r"Plain<\w+>|Ratio|Blockwise<\w+>"
    kinds = rf"NumberFormats<\w+, Plain<(\w+)>, (\w+)<(\w+)(?:, (\d+))?>((?:, (?:{buffer}))*) ?>"
    step = re.search(rf"step_kernel<(\w+)<\w+>, Arrays<{kinds}", text)
    if step:
        functor, grad, kind, param, low_bits, of_buffers = step.groups()
        kept = {"Plain": "", "Mastered": " master", "Split": f" split{low_bits}"}[kind]
        buffers = re.findall(buffer, of_buffers)
        stored = stored_in(buffers, "double" if param == "double" else "float")
        if "FastShape<" in text and param != "float":
            threads //= 2
        name = f"step {functor}{len(buffers)} {param}{kept}, {grad} grad, {stored} buffers"
        codes = sum(not each.startswith("Plain") for each in buffers)
        exponents = sum(each.startswith("Blockwise") for each in buffers)
        return name, threads, (low_bits == "8") + codes + exponents
    arrays = r"AveragedArrays<(Plain|Split)<(\w+)(?:, (\d+))?>, Plain<(\w+)> ?>"
    average = re.search(rf"average_kernel<{arrays}", text)
    if average:
        kind, weight, low_bits, stored = average.groups()
        kept = f" split{low_bits}" if kind == "Split" else ""
        return f"average {weight}{kept}, {stored}", threads, low_bits == "8"
    other = re.search(r"(scan|multiply|count)_kernel<(\w+)[,>]", text)
    if other:
        kernel, grad = other.groups()
        with_sum = " and sum" if ", true>" in text else ""
        return f"{kernel}{with_sum} {grad}", threads, 0
    return re.sub(r"^void |\(.*", "", text), threads, 0


def printed_by(command: list[str | Path], text: str = "") -> str:
    """Returns the output of a program."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"check_machine_code.py: {command[0]} {command[-1]}: {done.stderr.strip()}")
    return done.stdout


def parse(listing: str, architecture: str) -> list[Kernel]:
    """Returns the kernels in the output of nvdisasm."""
    kernels: list[Kernel] = []
    for section in listing.split("\n.text.")[1:]:
        symbol, _, body = section.partition(":\n")
        code: list[Instruction] = []
        labels: dict[str, int] = {}
        for line in body.splitlines():
            if label := LABEL.match(line):
                labels[label[1]] = len(code)
            elif found := INSTRUCTION.match(line):
                target = TARGET.search(found[4])
                code.append(Instruction(found[2], found[3], target and target[1]))
        kernels.append(Kernel(symbol, "", architecture, code, labels))
    signatures = printed_by(["c++filt"], "\n".join(each.symbol for each in kernels)).splitlines()
    for kernel, signature in zip(kernels, signatures, strict=True):
        kernel.name, kernel.threads, kernel.arrays_of_bytes = name_of(signature)
        kernel.is_fast = re.search(r"StepPath\)[1-9]>\(", signature) is not None
        kernel.loops = loops_of(kernel.code, kernel.labels)
    return kernels


def read_log(log: str, kernels: dict[tuple[str, str], Kernel]) -> None:
    """Adds registers, stack and spills of each kernel from the output of ptxas."""
    kernel = None
    for line in log.splitlines():
        if found := re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line):
            kernel = kernels.get((found[1], found[2]))
        if found := re.search(r"Function properties for (\w+)", line):
            # After a kernel, ptxas lists the functions that it calls.
            kernel = kernel if kernel and kernel.symbol == found[1] else None
        if kernel is None:
            continue
        if found := re.search(r"(\d+) bytes stack frame, (\d+) .* (\d+) bytes spill loads", line):
            kernel.stack, kernel.spills = int(found[1]), int(found[2]) + int(found[3])
        if found := re.search(r"Used (\d+) registers", line):
            kernel.registers = int(found[1])


class Row(NamedTuple):
    """The requirements for the kernels whose name and architecture match two patterns."""

    names: str  # shell pattern for names of kernels
    architectures: str  # shell pattern for architectures, such as "sm_90"
    blocks: int  # least blocks per multiprocessor
    loops: int  # least number of main loops


def read_table(text: str) -> list[Row]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    return [Row(names, where, int(blocks), int(loops)) for names, where, blocks, loops in cells]


def row_of(kernel: Kernel, rows: list[Row]) -> Row | None:
    """Returns the first row that matches, or None. Other formulas use the "other step" rows."""
    named = {row.names.split()[1] for row in rows if row.names.startswith("step ")}
    is_other = kernel.name.startswith("step ") and kernel.name.split()[1] not in named
    both = f"{'other ' * is_other}{kernel.name}|{kernel.architecture}"
    return next((r for r in rows if fnmatch.fnmatchcase(both, f"{r[0]}|{r[1]}")), None)


def faults(kernel: Kernel, row: Row) -> Iterator[str]:
    """Yields the faults of a kernel."""
    spills = SPILLS_OF_FAST_PATH if kernel.is_fast else SPILLS_OF_OTHERS
    if max(kernel.spills, kernel.stack) > spills:
        yield f"spills {kernel.spills} bytes, has {kernel.stack} bytes of stack"
    blocks = kernel.blocks * kernel.threads // 256  # in units of 256 threads
    if blocks < row.blocks:
        allowed = f"its {kernel.registers} registers allow {blocks} blocks on a multiprocessor"
        yield f"{allowed}, not {row.blocks}"
    main = kernel.main_loops()
    if len(main) < row.loops:
        yield f"128 bits are moved at once in {len(main)} innermost loops, not in {row.loops}"
    for loop in main:
        narrow = [each.opcode for each in loop if each.is_access and not each.is_wide]
        if len(narrow) > 2 * kernel.arrays_of_bytes:
            yield f"a main loop moves less than 128 bits at once: {', '.join(narrow)}"
    for loop in kernel.loops:
        local = [each for each in loop if each.is_local]
        loads_one = [each.name for each in local] == ["LDL"]
        if local and not (kernel.is_fast and loads_one):
            yield f"a loop uses local memory: {', '.join(each.opcode for each in local)}"


def check(kernels: list[Kernel], rows: list[Row]) -> list[str]:
    """Returns the faults of all kernels, each as a line of text."""
    wrong = []
    for kernel in kernels:
        row = row_of(kernel, rows)
        texts = list(faults(kernel, row)) if row else ["no row of the table has this kernel"]
        path = "fast " if kernel.is_fast else ""
        wrong += [f"{path}{kernel.name}, {kernel.architecture}: {text}" for text in texts]
    return wrong


def read(folder: Path) -> list[Kernel]:
    """Returns the kernels in the compiled files of a folder."""
    # nvdisasm is on the PATH, next to nvcc, or in a package of this Python.
    nvcc = Path(shutil.which("nvcc") or "nvcc")
    folders = [*os.get_exec_path(), f"{os.environ.get('CUDA_HOME', '')}/bin", nvcc.parent]
    folders += sorted(Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/bin"))
    nvdisasm = shutil.which("nvdisasm", path=os.pathsep.join(map(str, folders)))
    if nvdisasm is None:
        sys.exit("check_machine_code.py: nvdisasm is missing: pip install nvidia-cuda-nvdisasm")
    cubins = sorted([*folder.glob("*.compute_*.cubin"), *folder.glob("*.sm_*.cubin")])
    if not cubins:
        sys.exit(f"check_machine_code.py: there is no machine code in {folder}")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        listings = pool.map(lambda cubin: printed_by([nvdisasm, "-c", cubin]), cubins)
        kernels = [
            kernel
            for cubin, listing in zip(cubins, listings, strict=True)
            for kernel in parse(listing, re.sub(r"^\.(compute|sm)", "sm", cubin.suffixes[-2]))
        ]
    by_symbol = {(each.symbol, each.architecture): each for each in kernels}
    for log in folder.glob("*.log"):
        read_log(log.read_text(), by_symbol)
    unknown = [each.name for each in kernels if each.registers == 0]
    if unknown:
        sys.exit(f"check_machine_code.py: ptxas says nothing of {', '.join(unknown)}")
    return kernels


def main() -> int:
    kernels = read(Path(sys.argv[1]))
    wrong = check(kernels, read_table(TABLE.read_text()))
    for text in wrong:
        print(text, file=sys.stderr)
    print(f"check_machine_code.py: {len(kernels)} kernels, {len(wrong)} faults")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
