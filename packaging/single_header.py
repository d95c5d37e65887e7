#!/usr/bin/env python3
"""single_header.py FILE: writes mezzo/mezzo.h and every header of mezzo's that it includes as one header, which includes libtorch's and
the standard library's alone. CUDA kernels and the compiled library are left to the CMake package."""
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INCLUDE = ROOT / "include"
UNDEFINED = {"MEZZO_COMPILED_LIB"}  # whoever defines it needs the package

HEAD = """\
// mezzo {version}, mixed precision for libtorch in C++20, as one header: #include "mezzo.h" and link libtorch.
// It is mezzo/mezzo.h of the folder: regions of autocast, GradScaler, optimizers, schedules. Made by `./bootstrap single-header FILE`.
//
{licence}
#pragma once

#ifdef MEZZO_COMPILED_LIB
#error "mezzo as one header has no compiled library: use the CMake package for mezzo::compiled"
#endif
"""


def lines_of(header, seen):
    """The header's lines, with mezzo's own headers in place of their first include."""
    if header in seen:
        return
    seen.add(header)
    conditions = []  # of each #if around the line: whether it holds for certain, None where that is the compiler's matter
    for line in (INCLUDE / header).read_text(encoding="utf-8").splitlines():
        if match := re.match(r"#\s*(if|ifdef|ifndef)\b\s*(\w*)", line):
            kind, macro = match.groups()
            conditions.append(kind == "ifndef" if kind != "if" and macro in UNDEFINED else None)
        elif re.match(r"#\s*else\b", line):
            conditions[-1] = None if conditions[-1] is None else not conditions[-1]
        elif re.match(r"#\s*endif\b", line):
            conditions.pop()
        own = re.match(r"#include <(mezzo/[^>]+)>", line)
        if own and False not in conditions:
            if None in conditions:
                sys.exit(f"{header} includes {own[1]} under a condition that this script does not know")
            yield from lines_of(own[1], seen)
        elif not own and line != "#pragma once":
            yield line


def main():
    if len(sys.argv) != 2:
        sys.exit("give the file to write: ./bootstrap single-header mezzo.h")
    version = ".".join(re.findall(r"^#define MEZZO_VERSION_\w+ (\d+)$", (INCLUDE / "mezzo/base/version.h").read_text(), re.M))
    licence = "\n".join(f"// {line}".rstrip() for line in (ROOT / "LICENSE").read_text().splitlines())
    seen = set()
    body = "\n".join(lines_of("mezzo/mezzo.h", seen))
    file = Path(sys.argv[1])
    file.write_text(HEAD.format(version=version, licence=licence) + re.sub(r"\n{3,}", "\n\n", body) + "\n", encoding="utf-8")
    print(f"{file}: mezzo {version}, {len(seen)} headers, {len(file.read_text().splitlines())} lines")


if __name__ == "__main__":
    main()
