#!/usr/bin/env python3
"""Looks at the machine code of the summary's loops: vector_code.py OBJDUMP OBJECT...

The loop over floats must convert whole vectors of its instruction set, and keep its sums in registers: g++ 12 once put
one of them into memory at -O3, and the loop took a third longer.
"""
import re
import subprocess
import sys

KERNELS = {"avx2": ("ymm", 32)}


def instructions(listing, function, lanes):
    """(address, mnemonic, operands) of the function whose name has these parts."""
    name = re.compile(rf"^[0-9a-f]+ <.*detail::SummaryKernel<float, .*VectorLanes<float, {lanes}> >.*::{function}\(")
    found, result = False, []
    for line in listing:
        if re.match(r"^[0-9a-f]+ <", line):
            if found:
                break
            found = bool(name.match(line))
        elif found and (match := re.match(r"\s*([0-9a-f]+):\s+(\S+)\s*(.*)", line)):
            result.append((int(match[1], 16), match[2], match[3]))
    return result


def first_loop(code):
    for i, (address, mnemonic, operands) in enumerate(code):
        target = re.match(r"[0-9a-f]+", operands) if mnemonic.startswith("j") else None
        if target and int(target[0], 16) < address:
            return [instruction for instruction in code[: i + 1] if instruction[0] >= int(target[0], 16)]
    return []


def complaints(path, listing):
    for function, (register, lanes) in KERNELS.items():
        loop = first_loop(instructions(listing, function, lanes))
        text = [f"{mnemonic} {operands}" for _, mnemonic, operands in loop]
        if not any(re.match(rf"vcvtps2pd .*%{register}\d+$", line) for line in text):
            yield f"{path}: {function}: no loop that converts into {register} registers: {text}"
        stores = [line for line in text if re.search(r",(-?0x[0-9a-f]+)?\(%r[sb]p", line)]
        if stores:
            yield f"{path}: {function}: the loop writes to the stack: {stores}"


def main():
    objdump, *objects = sys.argv[1:]
    wrong = []
    for path in objects:
        command = [objdump, "--disassemble", "--demangle", "--no-show-raw-insn", path]
        wrong += complaints(path, subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())
    print("\n".join(wrong) or f"{len(objects)} objects: as they should be")
    return 1 if wrong or not objects else 0


if __name__ == "__main__":
    sys.exit(main())
