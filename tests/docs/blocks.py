#!/usr/bin/env python3
"""Writes the C++ code blocks of Markdown pages into a translation unit.

    blocks.py OUTPUT_FILE HAS_MPI PAGE...

Each ```cpp block, and the new side of each ```diff block, becomes a function that is compiled and never called; a block that
begins with a class, a template or a function becomes a namespace. prelude.h declares the names that blocks assume, such as
`model` and `loader`. A line of three dots is dropped. `#line` directives put page and line into the compiler's errors.
Blocks that need MPI are left out unless HAS_MPI is 1.
"""

import pathlib
import re
import sys

FENCE = re.compile(r"^```(\w*)")
INCLUDE = re.compile(r"^\s*#include\b")
DOTS = re.compile(r"^\s*\.\.\.\s*(//.*)?$")
AT_NAMESPACE_SCOPE = re.compile(
    r"^(struct|class|enum|template|namespace|TORCH_LIBRARY|static|inline|int main\(|[\w:<>]+[ &*]+\w+\([^;]*\) \{$)")


def read_blocks(page):
    """(first line number, lines) of each C++ block; removed lines of a diff are empty."""
    found, language, first, lines = [], None, 0, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = FENCE.match(line)
        if language is None and fence:
            language, first, lines = fence[1], number + 1, []
        elif language is not None and line.startswith("```"):
            if language == "diff":
                lines = ["" if line.startswith("-") else line[1:] for line in lines]
            if language in ("cpp", "diff"):
                found.append((first, lines))
            language = None
        elif language is not None:
            lines.append(line)
    if language is not None:
        sys.exit(f"{page}: the code block at line {first - 1} has no end")
    return found


def unit_text(page, first, lines):
    """The includes of a block, and its code as a function or namespace."""
    includes = [line for line in lines if INCLUDE.match(line)]
    # Dropped lines stay as empty lines, so that line numbers match.
    body = ["" if INCLUDE.match(line) or DOTS.match(line) else line for line in lines]
    code = [line for line in body if line.strip() and not line.lstrip().startswith("//")]
    if not code:
        return includes, ""
    # prelude.h may declare names in the page's namespace. The function returns int, so that blocks may have `return status;`.
    name = re.sub(r"[^a-z0-9]", "_", page.stem.lower())
    opening = f"namespace docs::page_{name} {{ [[maybe_unused]] static int block_{first}() {{"
    if AT_NAMESPACE_SCOPE.match(code[0]):
        opening = f"namespace docs::page_{name} {{ namespace block_{first} {{"
    text = "\n".join(body)
    return includes, f'{opening}\n#line {first} "{page}"\n{text}\n}} }}\n'


def main():
    output, has_mpi, *pages = sys.argv[1:]
    all_includes, texts = [], []
    for page in map(pathlib.Path, sorted(pages)):
        for first, lines in read_blocks(page):
            includes, text = unit_text(page, first, lines)
            needs_mpi = any("/mpi_" in line for line in includes) or re.search(r"\bMPI_COMM_WORLD\b", text)
            if needs_mpi and has_mpi != "1":
                continue
            all_includes += (line.strip() for line in includes)
            texts.append(text)
    if not texts:
        sys.exit("blocks.py: no C++ blocks in these pages")
    source = "\n".join(['#include "prelude.h"', *dict.fromkeys(all_includes), *texts])
    pathlib.Path(output).write_text(source, encoding="utf-8")


if __name__ == "__main__":
    main()
