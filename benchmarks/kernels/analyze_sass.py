#!/usr/bin/env python3
"""Analyzes the machine code of mezzo's CUDA kernels: a table of each kernel on each architecture.

    analyze_sass.py [--architectures 80,86,89,90,100,120]   compiles the kernels, prints the table
    analyze_sass.py --check                                 fails if a kernel misses a goal (missed_goals)

Registers, stack, shared memory and local accesses (such as spills) are of the whole kernel. Instructions per element are
counted in the vectorized loop, on its shortest path that moves whole vectors only: without model parameters, zeroed
gradients or a tail, and with the path of divisions and roots without subnormals. Predicated instructions count, since a
warp issues them either path.

Needs nvcc and cuobjdump, on PATH, in CUDA's usual directory or in .deps/venv (bootstrap installs PyPI's).
"""

import argparse
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
ARCHITECTURES = ["80", "86", "89", "90", "100", "120"]
BYTES = {"float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2}
LOADS = ("LDG", "LD")
MOMENTS = {"AdamFunctor<false>": 2, "AdamFunctor<true>": 3, "SgdFunctor<false>": 0, "SgdFunctor<true>": 1,
           "LionFunctor": 1}

# --- cuobjdump output ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Instruction:
    address: int
    predicate: str  # "" or "@P0"
    opcode: str     # with its modifiers: LDG.E.128
    operands: str

    @property
    def name(self):
        return self.opcode.split(".")[0]

    def target(self):
        """The target of a branch, or None."""
        found = re.search(r"0x([0-9a-f]+)\s*$", self.operands)
        return int(found.group(1), 16) if found else None


INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);")


def parse_sass(text):
    """{mangled name: [Instruction]} of `cuobjdump -sass`."""
    functions, current = {}, None
    for line in text.splitlines():
        if "Function :" in line:
            current = functions.setdefault(line.split("Function :")[1].strip(), [])
            continue
        found = INSTRUCTION.match(line)
        if found and current is not None:
            current.append(Instruction(int(found[1], 16), found[2] or "", found[3], found[4].strip()))
    return functions


def parse_usage(text):
    """{mangled name: {"REG": 61, "STACK": 0, ...}} of `cuobjdump -res-usage`."""
    usage, current = {}, None
    for line in text.splitlines():
        found = re.match(r"\s*Function (\S+):\s*$", line)
        if found:
            current = found[1]
        elif current and "REG:" in line:
            usage[current] = {key: int(value) for key, value in re.findall(r"(\w+)(?:\[\d+\])?:(\d+)", line)}
            current = None
    return usage


# --- Loop paths ---------------------------------------------------------------------------------------------------------


def is_jump(instruction):
    """On sm_80 ptxas leaves loops by conditional calls; calls of functions are unconditional."""
    return instruction.name == "CALL" and instruction.predicate != ""


class Graph:
    """The basic blocks of a function."""

    def __init__(self, instructions):
        leaders = {instructions[0].address}
        for here, after in zip(instructions, instructions[1:] + [None]):
            if here.name in ("BRA", "EXIT", "RET", "BRX", "JMP", "BREAK") or is_jump(here):
                if (here.name == "BRA" or is_jump(here)) and here.target() is not None:
                    leaders.add(here.target())
                if after is not None:
                    leaders.add(after.address)
        self.blocks, block = {}, None
        for instruction in instructions:
            if instruction.address in leaders:
                block = self.blocks.setdefault(instruction.address, [])
            block.append(instruction)
        starts = sorted(self.blocks)
        self.first = starts[0]
        self.next = {}
        for start, following in zip(starts, starts[1:] + [None]):
            last = self.blocks[start][-1]
            to = []
            # `@P0 BRA P1, 0x...` has a second predicate as an operand.
            is_certain = not last.predicate and not re.match(r"!?U?P\d", last.operands)
            if (last.name == "BRA" or is_jump(last)) and last.target() in self.blocks:
                to.append(last.target())
            if following is not None and not (last.name in ("BRA", "EXIT", "RET", "BRX", "JMP") and is_certain):
                to.append(following)
            self.next[start] = to

    def dominators(self):
        before = {block: [] for block in self.blocks}
        for block, to in self.next.items():
            for other in to:
                before[other].append(block)
        everything = set(self.blocks)
        found = {block: everything for block in self.blocks}
        found[self.first] = {self.first}
        changed = True
        while changed:
            changed = False
            for block in sorted(self.blocks):
                if block == self.first:
                    continue
                sets = [found[other] for other in before[block]]
                own = (set.intersection(*sets) if sets else set()) | {block}
                if own != found[block]:
                    found[block], changed = own, True
        return found, before

    def loops(self):
        """[(header, [latch blocks], blocks of the loop)]"""
        dominators, before = self.dominators()
        ends = {}
        for block, to in self.next.items():
            for header in to:
                if header in dominators[block]:
                    ends.setdefault(header, []).append(block)
        for header, latches in ends.items():
            body, open_blocks = {header}, list(latches)
            while open_blocks:
                block = open_blocks.pop()
                if block not in body:
                    body.add(block)
                    open_blocks += before[block]
            yield header, latches, body

    def shortest_path(self, header, latches, body, is_allowed):
        """The instructions of the shortest path of a loop through allowed blocks, or None."""
        best = {}  # block: (instructions up to its end, the block before)
        waiting = [(0, header, None)]
        while waiting:
            waiting.sort(reverse=True, key=lambda entry: entry[0])
            length, block, came_from = waiting.pop()
            if block in best or not is_allowed(self.blocks[block]):
                continue
            best[block] = (length + len(self.blocks[block]), came_from)
            waiting += [(best[block][0], to, block) for to in self.next[block] if to in body and to != header]
        reached = [latch for latch in latches if latch in best]
        if not reached:
            return None
        path, block = [], min(reached, key=lambda latch: best[latch][0])
        while block is not None:
            path = self.blocks[block] + path
            block = best[block][1]
        return path


def access_bytes(instruction):
    """Bytes of a thread's access to global memory, or 0."""
    if instruction.name not in ("LDG", "STG", "LD", "ST"):
        return 0
    sizes = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
    return next((sizes[word] for word in instruction.opcode.split(".") if word in sizes), 4)


def loaded(path):
    """Bytes of unconditional loads."""
    return sum(access_bytes(one) for one in path if one.name in LOADS and not one.predicate)


def vectorized_loop(graph, smallest, is_written=False):
    """The path of the loop that loads the most bytes, by loads of at least `smallest` bytes, and stores if is_written."""
    def is_allowed(block):
        return not any(one.name == "CALL" and not is_jump(one)
                       or 0 < access_bytes(one) < smallest and not one.predicate for one in block)


    paths = [graph.shortest_path(*loop, is_allowed) for loop in graph.loops()]
    paths = [path for path in paths if path and loaded(path) > 0
            and (not is_written or any(one.name in ("STG", "ST") for one in path))]
    return max(paths, key=lambda path: (loaded(path), len(path)), default=None)


def class_of(instruction):
    name, words = instruction.name, instruction.opcode.split(".")
    if "F64" in words or re.match(r"D(ADD|MUL|FMA|SETP|MNMX)$", name):
        return "fp64"
    if name in ("F2F", "F2FP", "I2F", "F2I", "I2FP", "F2IP", "FRND") or (name == "HADD2" and "F32" in words):
        return "conversion"
    if name == "MUFU":
        return "special"
    if re.match(r"(FADD|FMUL|FFMA|FSETP|FSEL|FMNMX|FCHK|FSET|FSWZADD|HFMA2|HMUL2|HADD2|HSETP2|HMNMX2)", name):
        return "float"
    if re.match(r"(LD|ST|ULD|LDC|ATOM|RED)", name):
        return "memory"
    if re.match(r"(BRA|BSSY|BSYNC|EXIT|RET|CALL|BAR|NOP|WARPSYNC|BREAK|YIELD|DEPBAR)", name):
        return "control"
    return "integer"


# --- Kernels -----------------------------------------------------------------------------------------------------------


def arguments_of(name):
    """The outer template arguments."""
    opened = name.find("<")
    if opened < 0:
        return []
    depth, words, word = 0, [], ""
    for letter in name[opened + 1:]:
        if letter == "<":
            depth += 1
        elif letter == ">":
            if depth == 0:
                break
            depth -= 1
        if letter == "," and depth == 0:
            words.append(word.strip())
            word = ""
        else:
            word += letter
    return words + [word.strip()]


def plain_name(demangled):
    """optimizer_step_kernel<float, c10::Half, AdamFunctor<false>, PlainWeightFormat<float>, ...> without namespaces."""
    name = re.sub(r"\bmezzo::(?:\w+::)*", "", demangled)
    name = re.sub(r"^(?:static )?void ", "", name)
    depth = 0
    for i, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            return name[:i]
    return name


@dataclasses.dataclass
class Kernel:
    title: str             # "Adam float16"
    loaded: int = 0        # bytes loaded per element; 0 without a vectorized loop
    stored: int = 0
    gradient: int = 0      # bytes of a gradient, whose loads depend on its dtype and alignment
    smallest: int = 8      # bytes of a vector load


TITLES = {"AdamFunctor<false>": "Adam", "AdamFunctor<true>": "Adam amsgrad", "SgdFunctor<false>": "SGD",
          "SgdFunctor<true>": "SGD momentum", "LionFunctor": "Lion"}


def kernel_of(demangled):
    name = plain_name(demangled)
    kind, arguments = name.split("<")[0], arguments_of(name)
    short = {"c10::Half": "float16", "c10::BFloat16": "bfloat16"}
    words = [short.get(argument, argument) for argument in arguments]
    smallest = 16 if arguments and arguments[0] == "double" else 8
    if kind in ("grad_stats_kernel", "unscale_kernel"):
        own = BYTES[arguments[0]]
        return Kernel(f"{kind[:-7]} {words[0]}", own, own if kind == "unscale_kernel" else 0, smallest=16)
    if kind == "adamw8bit_kernel":  # no purely vectorized loop: tails and moment formats are branches
        return Kernel(f"AdamW8bit {words[0]}")
    if kind != "optimizer_step_kernel":
        return Kernel(kind[:-7])
    functor, weight_format = arguments[1], arguments[2]
    parameter = BYTES[arguments[0]]
    gradient = 8 if parameter == 8 else 4  # the shortest path is that of gradients without conversion
    moment = 4 if "Split" in weight_format else parameter
    low_bits = 2 if "Split" in weight_format else 0
    moments = moment * MOMENTS.get(functor, 2)
    read = parameter + moments + low_bits
    written = parameter + low_bits + moments
    how = " split" if "Split" in weight_format else " stochastic" if "Stochastic" in weight_format else ""
    return Kernel(f"{TITLES.get(functor, functor)} {words[0]}{how}", read, written, gradient, smallest)


def demangled(names):
    tool = shutil.which("c++filt") or sys.exit("c++filt, of binutils, is missing")
    output = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return dict(zip(names, output.splitlines()))


def rows_of(architecture, sass, usage):
    """A dictionary for each kernel of an architecture."""
    functions, resources = parse_sass(sass), parse_usage(usage)
    names = demangled([name for name in functions if "_kernel" in name])
    rows = []
    for mangled, name in names.items():
        kernel, instructions, used = kernel_of(name), functions[mangled], resources[mangled]
        row = {"kernel": kernel.title, "sm": architecture, "registers": used["REG"], "stack": used["STACK"],
               "shared": used["SHARED"], "local": sum(one.name in ("LDL", "STL") for one in instructions),
               "wide_loads": sum(one.name in LOADS and access_bytes(one) >= 16 for one in instructions),
               "bytes": kernel.loaded + kernel.stored + kernel.gradient}
        path = vectorized_loop(Graph(instructions), kernel.smallest, kernel.stored > 0) if kernel.loaded else None
        if path:
            elements = loaded(path) / kernel.loaded
            row["elements"] = elements
            row["instructions"] = len(path) / elements
            for one in path:
                key = class_of(one)
                row[key] = row.get(key, 0) + 1 / elements
        rows.append(row)
    return sorted(rows, key=lambda row: row["kernel"])


WIDTH = 48  # of a kernel's name in a table
CLASSES = ["float", "special", "conversion", "fp64", "integer", "memory", "control"]


def table_of(rows):
    lines = [f"{'kernel':{WIDTH}} {'sm':>4} {'regs':>5} {'stack':>5} {'local':>5} {'shared':>6} {'wide':>4} "
             f"{'bytes':>5} {'instr.':>7} " + " ".join(f"{name[:7]:>7}" for name in CLASSES)]
    for row in rows:
        counts = [f"{row.get(name, 0):7.2f}" for name in CLASSES] if "instructions" in row else []
        total = f"{row['instructions']:7.2f}" if counts else ""
        lines.append(f"{row['kernel']:{WIDTH}} {row['sm']:>4} {row['registers']:5} {row['stack']:5} {row['local']:5} "
                     f"{row['shared']:6} {row['wide_loads']:4} {row['bytes'] or '':5} {total:>7} "
                     + " ".join(counts))
    return "\n".join(line.rstrip() for line in lines)


def missed_goals(rows):
    """Messages for the goals that rows miss."""
    for row in rows:
        name = f"{row['kernel']} on sm_{row['sm']}"
        if row["local"] or row["stack"]:
            yield f"{name} has {row['stack']} bytes of stack and {row['local']} local accesses"
        if "instructions" not in row or "double" in row["kernel"]:
            continue
        # A sum of squares is added to a float64 once per iteration.
        uses_fp64 = row["kernel"].startswith("grad_stats")
        if row.get("fp64", 0) > (1 if uses_fp64 else 0):
            yield f"{name} takes {row['fp64']:.2f} float64 instructions per element"
        limit = 40 if row["kernel"] == "Adam float16" else 6 if row["kernel"].startswith("grad_stats") else None
        if limit and row["instructions"] > limit:
            yield f"{name} takes {row['instructions']:.2f} instructions per element, limit {limit}"


def rows_of_table(text):
    """Parses the output of table_of."""
    keys = ["registers", "stack", "local", "shared", "wide_loads", "bytes", "instructions", *CLASSES]
    rows = []
    for line in text.splitlines()[1:]:
        sm, *numbers = line[WIDTH:].split()
        rows.append({"kernel": line[:WIDTH].strip(), "sm": sm, **dict(zip(keys, map(float, numbers)))})
    return rows


# --- Compilation --------------------------------------------------------------------------------------------------------


def tool(name):
    places = [os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin", *map(str, ROOT.glob(
        ".deps/venv/lib/python3*/site-packages/nvidia/cu13/bin"))]
    found = shutil.which(name) or shutil.which(name, path=os.pathsep.join(places))
    return found or sys.exit(f"{name} is neither on PATH nor in {', '.join(places)}")


def compiled(architecture, libtorch, directory):
    """(sass, usage) of the kernels as nvcc compiles them."""
    torch = libtorch / "include"
    cubin = directory / f"sm_{architecture}.cubin"
    subprocess.run([tool("nvcc"), "-std=c++20", "-O3", "-DNDEBUG", f"-I{ROOT / 'include'}",
                    f"-isystem={torch}", f"-isystem={torch / 'torch/csrc/api/include'}", f"-arch=sm_{architecture}",
                    "-cubin", ROOT / "include/mezzo/kernels/cuda/mezzo_cuda.cu", "-o", cubin], check=True)
    ask = lambda option: subprocess.run([tool("cuobjdump"), option, cubin], capture_output=True, text=True,
                                        check=True).stdout
    return ask("-sass"), ask("-res-usage")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--architectures", default=",".join(ARCHITECTURES))
    parser.add_argument("--libtorch", type=pathlib.Path, default=ROOT / ".deps" / "libtorch")
    parser.add_argument("--check", action="store_true", help="fail where a kernel misses a goal")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for architecture in options.architectures.split(","):
            rows += rows_of(architecture, *compiled(architecture, options.libtorch, pathlib.Path(directory)))
    rows.sort(key=lambda row: (row["kernel"], ARCHITECTURES.index(row["sm"])))
    print(table_of(rows))
    missed = list(missed_goals(rows))
    if options.check and missed:
        sys.exit("\n".join(missed))


if __name__ == "__main__":
    main()
