#!/usr/bin/env python3
"""Checks that headers include only what lies on floors below their own, and that umbrellas are complete.

    check_layers.py INCLUDE_FOLDER

Prints each line that does not, and exits with 1. See "The rooms" in CONTRIBUTING.md.
"""

import pathlib
import re
import sys

# From the ground up. A room knows the rooms below its floor, and none beside it.
FLOORS = [
    ["base"],
    ["kernels"],
    ["optim", "autocast"],
    ["scaling"],
    ["opt_levels", "diagnostics", "checkpoint", "distributed"],
]
# Files of many ranks are files.
EXCEPTIONS = {("distributed", "checkpoint")}
# Public headers that their room's umbrella leaves out: they need MPI or NCCL, or come by themselves.
BY_NAME = re.compile(r"distributed/(mpi|gloo)_|optim/compiled\.h")

# What these include, and what that includes, has none of the kernels: they cost seconds to compile.
WITHOUT_KERNELS = ["mezzo/optim/ema.h"]
DECLARATIONS = {"mezzo/kernels/graph_capture.h", "mezzo/kernels/kernel_dispatch.h"}  # of functions alone

FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
INCLUDE = re.compile(r'#\s*include\s*[<"](mezzo/[^>"]+)[>"]')


def room_of(path):
    """The room of `path`, which begins with mezzo/; None for an umbrella header, which stands above all rooms."""
    parts = path.split("/")
    return parts[1] if len(parts) > 2 else None


def fault_of(path, included):
    """What is wrong with the header at `path` including `included`; None if nothing is."""
    own, other = room_of(path), room_of(included)
    if own is None or own == other:
        return None
    if other is None:
        return "a room includes no umbrella header"
    if other not in FLOOR:
        return f"{other} is no room"
    if (own, other) in EXCEPTIONS or FLOOR[other] < FLOOR[own]:
        return None
    return f"{own} is on floor {FLOOR[own]}, {other} on floor {FLOOR[other]}; an include goes down"


def way_to_kernels(include, path, known):
    """The includes that lead from `path` to a header of the kernels; none where none does."""
    if path in known or not (include / path).exists():
        return []
    known.add(path)
    for included in INCLUDE.findall((include / path).read_text(encoding="utf-8")):
        is_kernel = room_of(included) == "kernels" and included not in DECLARATIONS
        way = [included] if is_kernel else way_to_kernels(include, included, known)
        if way:
            return [path, *way]
    return []


def main():
    include = pathlib.Path(sys.argv[1])
    headers = sorted(path for path in include.glob("mezzo/**/*") if path.suffix in {".h", ".cuh", ".cu", ".cpp"})
    faults = 0
    for header in headers:
        path = header.relative_to(include).as_posix()
        room = room_of(path)
        if room is not None and room not in FLOOR:
            print(f"{header}: {room} is no room; the rooms are {', '.join(FLOOR)}")
            faults += 1
            continue
        for number, line in enumerate(header.read_text(encoding="utf-8").splitlines(), 1):
            found = INCLUDE.search(line)
            if not found:
                continue
            fault = fault_of(path, found[1])
            if not (include / found[1]).exists():
                fault = "there is no such header"
            if fault is not None:
                print(f"{header}:{number}: {line.strip()}: {fault}")
                faults += 1
    for room in FLOOR:
        umbrella = include / f"mezzo/{room}.h"
        if not umbrella.exists():
            continue
        exported = set(INCLUDE.findall(umbrella.read_text(encoding="utf-8")))
        for header in sorted((include / "mezzo" / room).glob("*.h")):
            path = header.relative_to(include).as_posix()
            if path not in exported and not BY_NAME.search(path):
                print(f"{umbrella}: lacks {path}")
                faults += 1
    for light in WITHOUT_KERNELS:
        way = way_to_kernels(include, light, set())
        if way:
            print(f"{include / light} brings kernels: {' -> '.join(way)}")
            faults += 1
    if not headers:
        print(f"{include} holds no headers of mezzo's")
    return 1 if faults or not headers else 0


if __name__ == "__main__":
    sys.exit(main())
