"""Reads the machine code of the CUDA kernels and refuses what makes them slow.

    python scripts/check_machine_code.py FOLDER

``FOLDER`` holds, for each source and architecture, ``NAME.compute_90.cubin`` as ``nvcc --keep``
leaves it, and in ``*.log`` what ``ptxas -v`` said. The table ``machine_code.txt`` beside this file
says what each kernel must reach; it is printed with what they do reach. Exit code 1 if one falls
short.

A loop is a set of instructions of which each leads to every other; an innermost one holds no other.
The main loops of a kernel are the innermost ones in which a thread moves 128 bits at once: as many
as the table says, or one was compiled to narrower accesses, and maybe more, where the compiler has
made two of one. In a main loop every access to global memory has 128 bits, but for one load and one
store of each array of 8 bits (the lower parts of masters, codes and their exponents), and there is
none to local memory, where spilled registers are. Every other innermost loop goes over single
elements, and has no more accesses than a main loop, unless it was unrolled or should have been one.

Loads in flight are those of a thread before it uses what the first has brought. Instructions of an
element are those of the main loop, whether all are run or not, without what it calls.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import networkx

TABLE = Path(__file__).with_name("machine_code.txt")

# Of each multiprocessor of the architectures that are compiled for here.
REGISTERS = 65536
THREADS = 2048
REGISTERS_AT_ONCE = 256  # a warp gets them in pieces of this size

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(?:(@!?U?P\w+)\s+)?([\w.]+)\s*(.*?)\s*;")
LABEL = re.compile(r"^(\.L_\w+):")
TARGET = re.compile(r"`\((\.L_\w+)\)")
WIDTH = re.compile(r"\.[US]?(8|16|64|128|256)\b")
ENDS = ("BRA", "EXIT", "RET", "BRX", "JMP")
BYTES = {"float": 4, "double": 8, "Half": 2, "BFloat16": 2}


class UnreadableError(Exception):
    """What was compiled cannot be checked."""


@dataclass
class Instruction:
    """One line of machine code."""

    predicate: str | None
    opcode: str
    operands: str
    target: str | None

    @property
    def name(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def is_load(self) -> bool:
        return self.name in ("LDG", "LD") and not self.is_volatile

    @property
    def is_store(self) -> bool:
        return self.name in ("STG", "ST") and not self.is_volatile

    @property
    def is_volatile(self) -> bool:
        """Whether this speaks to other blocks: never a tensor's memory."""
        return "STRONG" in self.opcode

    @property
    def is_local(self) -> bool:
        return self.name in ("LDL", "STL")

    @property
    def width(self) -> int:
        """Bits that a load or store moves."""
        found = WIDTH.search(self.opcode)
        return int(found[1]) if found else 32

    def loaded_registers(self) -> set[str]:
        first = int(self.operands.partition(",")[0].removeprefix("R").partition(".")[0])
        return {f"R{first + i}" for i in range(max(self.width // 32, 1))}

    def registers_read(self) -> set[str]:
        sources = self.operands if self.is_store else self.operands.partition(",")[2]
        return set(re.findall(r"\bR\d+\b", sources))


@dataclass
class Kernel:
    """The machine code of a kernel, and what it takes of a multiprocessor."""

    symbol: str
    name: str
    architecture: str
    code: list[Instruction]
    labels: dict[str, int]
    registers: int = 0
    stack: int = 0
    spills: int = 0
    threads: int = 256
    bytes_read: int = 0  # of an element
    arrays_of_bytes: int = 0
    loops: list[list[Instruction]] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        """Returns how many blocks a multiprocessor has room for at once."""
        of_warp = -(-self.registers * 32 // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE
        return min(REGISTERS // (of_warp * self.threads // 32), THREADS // self.threads)

    def main_loops(self) -> list[list[Instruction]]:
        return [loop for loop in self.loops if any(is_wide(each) for each in loop)]


def is_access(instruction: Instruction) -> bool:
    return instruction.is_load or instruction.is_store


def is_wide(instruction: Instruction) -> bool:
    return is_access(instruction) and instruction.width >= 128


def cycles(blocks: Iterable[int], following: dict[int, list[int]]) -> Iterator[set[int]]:
    """Yields the sets of blocks of which each leads to every other."""
    inside = set(blocks)
    graph = networkx.DiGraph()
    graph.add_edges_from((each, after) for each in inside for after in following[each])
    for found in networkx.strongly_connected_components(graph.subgraph(inside)):
        if len(found) > 1 or not found.isdisjoint(following[min(found)]):
            yield found


def innermost(
    blocks: Iterable[int], following: dict[int, list[int]], leading: dict[int, list[int]]
) -> Iterator[set[int]]:
    """Yields the innermost loops: what is left when the entries of the loops around are gone."""
    for loop in cycles(blocks, following):
        # None leads into the endless loop behind the end of a kernel.
        entry = min(
            (each for each in loop if not loop.issuperset(leading[each])), default=min(loop)
        )
        inner = list(innermost(loop - {entry}, following, leading))
        yield from inner or [loop]


def loops_of(code: list[Instruction], labels: dict[str, int]) -> list[list[Instruction]]:
    """Returns the instructions of each innermost loop, in their order."""
    behind_branches = [i + 1 for i, each in enumerate(code) if each.name in ENDS]
    starts = sorted({0, *behind_branches, *labels.values()} - {len(code)})
    ends = dict(zip(starts, [*starts[1:], len(code)], strict=True))  # of blocks, by their starts
    following: dict[int, list[int]] = {}
    leading: dict[int, list[int]] = {start: [] for start in starts}
    leading[0].append(-1)  # the launch
    for start, end in ends.items():
        last = code[end - 1]
        # The target of a call is no part of the loop that calls.
        following[start] = [labels[last.target]] if last.name == "BRA" and last.target else []
        if end in ends and (last.name not in ENDS or last.predicate is not None):
            following[start].append(end)
        for target in following[start]:
            leading[target].append(start)
    return [
        [each for start in sorted(loop) for each in code[start : ends[start]]]
        for loop in innermost(starts, following, leading)
    ]


def loads_in_flight(loop: list[Instruction]) -> int:
    """Returns how many loads a pass starts before it uses the first."""
    loaded: set[str] = set()
    count = 0
    for instruction in loop:
        if loaded & instruction.registers_read():
            break
        if instruction.is_load:
            count += 1
            loaded |= instruction.loaded_registers()
    return count


def stored_in(buffers: list[str], computed: str) -> str:
    """Returns what buffers of these kinds are stored in; that which is computed in, of none."""
    if any(kind.startswith("Blockwise") for kind in buffers):
        return "8bit"
    if "Ratio" in buffers:
        return "8bit-bf16"
    return buffers[0].removeprefix("Plain<").removesuffix(">") if buffers else computed


def name_of(signature: str) -> tuple[str, int, int, int]:
    """Returns what a signature says of a kernel.

    A short name, its threads, the bytes that it reads for an element, and how many arrays of 8 bits
    it loads and stores, by half packs or less.
    """
    text = re.sub(r"amp_ext::|cuda::|\(anonymous namespace\)::", "", signature)
    shape = re.search(r"\bShape<(\d+)", text)
    threads = int(shape[1]) if shape else 256
    buffer = r"Plain<\w+>|Ratio|Blockwise<\w+>"
    kinds = rf"Kinds<\w+, Plain<(\w+)>, (\w+)<(\w+)(?:, (\d+))?>((?:, (?:{buffer}))*) ?>"
    step = re.search(rf"step_kernel<(\w+)<\w+>, Streams<{kinds}", text)
    if step:
        functor, grad, kind, param, low_bits, of_buffers = step.groups()
        kept = {"Plain": "", "Mastered": " master", "Split": f" split{low_bits}"}[kind]
        bytes_of_param = {"": BYTES[param], " master": 4, " split16": 4, " split8": 3}[kept]
        buffers = re.findall(buffer, of_buffers)
        stored = stored_in(buffers, "double" if param == "double" else "float")
        name = f"step {functor}{len(buffers)} {param}{kept}, {grad} grad, {stored} buffers"
        plain = [BYTES[each[6:-1]] for each in buffers if each.startswith("Plain")]
        codes = len(buffers) - len(plain)
        bytes_read = BYTES[grad] + bytes_of_param + sum(plain) + codes
        exponents = sum(each.startswith("Blockwise") for each in buffers)
        return name, threads, bytes_read, (low_bits == "8") + codes + exponents
    streams = r"AveragedStreams<(Plain|Split)<(\w+)(?:, (\d+))?>, Plain<(\w+)> ?>"
    average = re.search(rf"average_kernel<{streams}", text)
    if average:
        kind, weight, low_bits, stored = average.groups()
        kept = f" split{low_bits}" if kind == "Split" else ""
        bytes_read = BYTES[weight] + int(low_bits or 0) // 8 + BYTES[stored]
        return f"average {weight}{kept}, {stored}", threads, bytes_read, low_bits == "8"
    other = re.search(r"(look|multiply|count)_kernel<(\w+),", text)
    if other:
        kernel, grad = other.groups()
        with_sum = " and sum" if ", true>" in text else ""
        return f"{kernel}{with_sum} {grad}", threads, BYTES[grad], 0
    return re.sub(r"^void |\(.*", "", text), threads, 0, 0


def demangled(symbols: list[str]) -> list[str]:
    done = subprocess.run(
        ["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def parse(listing: str, architecture: str) -> list[Kernel]:
    """Returns the kernels in what nvdisasm prints."""
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
                code.append(Instruction(found[2], found[3], found[4], target and target[1]))
        kernels.append(Kernel(symbol, "", architecture, code, labels))
    for kernel, signature in zip(
        kernels, demangled([each.symbol for each in kernels]), strict=True
    ):
        described = name_of(signature)
        kernel.name, kernel.threads, kernel.bytes_read, kernel.arrays_of_bytes = described
        kernel.loops = loops_of(kernel.code, kernel.labels)
    return kernels


def read_log(log: str, kernels: dict[tuple[str, str], Kernel]) -> None:
    """Adds what ptxas says of each kernel."""
    kernel = None
    for line in log.splitlines():
        if found := re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line):
            kernel = kernels.get((found[1], found[2]))
        if kernel is None:
            continue
        if found := re.search(r"(\d+) bytes stack frame, (\d+) .* (\d+) bytes spill loads", line):
            kernel.stack, kernel.spills = int(found[1]), int(found[2]) + int(found[3])
        if found := re.search(r"Used (\d+) registers", line):
            kernel.registers = int(found[1])


@dataclass
class Row:
    """What the kernels of some names and architectures must reach."""

    names: str
    architectures: str
    blocks: int
    loops: int
    kernels: list[Kernel] = field(default_factory=list)

    def has(self, name: str, architecture: str) -> bool:
        return fnmatch.fnmatchcase(name, self.names) and fnmatch.fnmatchcase(
            architecture, self.architectures
        )


def read_table(text: str) -> list[Row]:
    rows = []
    for line in text.splitlines():
        if line and not line.startswith("#"):
            names, architectures, blocks, loops = (part.strip() for part in line.split("|"))
            rows.append(Row(names, architectures, int(blocks), int(loops)))
    return rows


def row_of(kernel: Kernel, rows: list[Row]) -> Row | None:
    """Returns the row of a kernel: "other step ..." where none names the formula of a step."""
    named = {row.names.split()[1] for row in rows if row.names.startswith("step ")}
    is_other = kernel.name.startswith("step ") and kernel.name.split()[1] not in named
    name = f"other {kernel.name}" if is_other else kernel.name
    return next((row for row in rows if row.has(name, kernel.architecture)), None)


def faults(kernel: Kernel, row: Row) -> Iterator[str]:
    """Yields what is wrong with a kernel."""
    if kernel.spills or kernel.stack:
        yield f"spills {kernel.spills} bytes, has {kernel.stack} bytes of stack"
    if kernel.blocks < row.blocks:
        yield (
            f"its {kernel.registers} registers allow {kernel.blocks} blocks on a multiprocessor, "
            f"not {row.blocks}"
        )
    main = kernel.main_loops()
    if len(main) < row.loops:
        yield f"128 bits are moved at once in {len(main)} innermost loops, not in {row.loops}"
    for loop in main:
        narrow = [each.opcode for each in loop if is_access(each) and not is_wide(each)]
        if len(narrow) > 2 * kernel.arrays_of_bytes:
            yield f"a main loop moves less than 128 bits at once: {', '.join(narrow)}"
        local = [each.opcode for each in loop if each.is_local]
        if local:
            yield f"a main loop uses local memory: {', '.join(local)}"
    most = max((sum(map(is_access, loop)) for loop in main), default=0)
    for loop in kernel.loops:
        accesses = sum(map(is_access, loop))
        if loop not in main and row.loops and accesses > most:
            yield f"a loop over single elements has {accesses} accesses, a main loop {most}"


def check(kernels: list[Kernel], rows: list[Row]) -> list[str]:
    """Returns what is wrong, and sorts the kernels into the rows."""
    wrong = []
    for kernel in kernels:
        row = row_of(kernel, rows)
        if row is None:
            wrong.append(
                f"{kernel.name}, {kernel.architecture}: no row of the table has this kernel"
            )
            continue
        row.kernels.append(kernel)
        wrong += [f"{kernel.name}, {kernel.architecture}: {text}" for text in faults(kernel, row)]
    return wrong


def per_element(kernel: Kernel) -> list[float]:
    """Returns the instructions that each main loop has for an element."""
    found = []
    for loop in kernel.main_loops():
        loaded = sum(each.width // 8 for each in loop if each.is_load)
        found.append(len(loop) * kernel.bytes_read / loaded)
    return found


def between(values: Iterable[float]) -> str:
    texts = [f"{value:.0f}" for value in values]
    ordered = sorted(set(texts), key=float)
    return "–".join(ordered[:: max(len(ordered) - 1, 1)]) or "-"


def show(rows: list[Row]) -> None:
    """Prints a line for each row and architecture."""
    titles = ("architecture", "kernels", "registers", "blocks", "loads", "instructions", "kernel")
    print("{:<13}{:>7}{:>11}{:>8}{:>7}{:>14}  {}".format(*titles))
    for row in rows:
        for architecture in sorted({each.architecture for each in row.kernels}, key=len):
            kernels = [each for each in row.kernels if each.architecture == architecture]
            main = [loop for kernel in kernels for loop in kernel.main_loops()]
            print(
                f"{architecture:<13}{len(kernels):>7}"
                f"{between(each.registers for each in kernels):>11}"
                f"{between(each.blocks for each in kernels if row.loops):>8}"
                f"{between(map(loads_in_flight, main)):>7}"
                f"{between(value for each in kernels for value in per_element(each)):>14}"
                f"  {row.names}"
            )


def find_nvdisasm() -> str:
    """Returns the disassembler: on the PATH, beside nvcc, or among the packages of this Python."""
    nvcc = shutil.which("nvcc")
    folders = [os.environ.get("CUDA_HOME", ""), str(Path(nvcc).parent.parent) if nvcc else ""]
    candidates = [shutil.which("nvdisasm")]
    candidates += [str(Path(folder) / "bin" / "nvdisasm") for folder in folders if folder]
    packages = Path(sysconfig.get_paths()["purelib"])
    candidates += map(str, sorted(packages.glob("nvidia/*/bin/nvdisasm")))
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise UnreadableError("nvdisasm is missing: pip install nvidia-cuda-nvdisasm")


def disassembled(cubin: Path, nvdisasm: str) -> str:
    done = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UnreadableError(f"nvdisasm {cubin.name}: {done.stderr.strip()}")
    return done.stdout


def read(folder: Path) -> list[Kernel]:
    """Returns the kernels that were compiled into a folder."""
    nvdisasm = find_nvdisasm()
    cubins = sorted(folder.glob("*.compute_*.cubin"))
    if not cubins:
        raise UnreadableError(f"there is no machine code in {folder}")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        listings = pool.map(lambda cubin: disassembled(cubin, nvdisasm), cubins)
        kernels = [
            kernel
            for cubin, listing in zip(cubins, listings, strict=True)
            for kernel in parse(listing, cubin.suffixes[-2].replace(".compute", "sm"))
        ]
    by_symbol = {(each.symbol, each.architecture): each for each in kernels}
    for log in folder.glob("*.log"):
        read_log(log.read_text(), by_symbol)
    unknown = [each.name for each in kernels if each.registers == 0]
    if unknown:
        raise UnreadableError(f"ptxas says nothing of {', '.join(unknown)}")
    return kernels


def main() -> int:
    try:
        kernels = read(Path(sys.argv[1]))
    except UnreadableError as error:
        print(f"check_machine_code.py: {error}", file=sys.stderr)
        return 1
    rows = read_table(TABLE.read_text())
    wrong = check(kernels, rows)
    show(rows)
    for text in wrong:
        print(text, file=sys.stderr)
    if wrong:
        print(f"check_machine_code.py: {len(wrong)} faults", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
