#!/usr/bin/env python3
"""Checks that the tests cited in the tables of a page exist.

    cited_tests.py PAGE BUILD_DIRECTORY PROGRAM... [--not-built DIRECTORY...]

The last cell of each row cites at least one test, as `Suite.Test` or by its name in CTest. A test exists if a program lists it, if
CTest lists it, or if a source in a directory of --not-built declares it.
"""
import argparse
import re
import subprocess
import sys
from pathlib import Path


def run_command(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def list_tests(program: Path) -> set[str]:
    """The tests of a program, without the names of parameters."""
    names, suite = set(), ""
    for line in run_command(program, "--gtest_list_tests").splitlines():
        word = line.split("#")[0].strip()
        if not line.startswith(" "):
            suite = re.sub(r"^\w+/(?=\w*[A-Z])|/\w+(?=\.$)", "", word)
        elif word:
            names.add(suite + word.split("/")[0])
    return names


def find_declared_tests(directory: Path) -> set[str]:
    names = {f"{suite}.{test}" for source in directory.rglob("*.cpp")
             for suite, test in re.findall(r"\bTEST(?:_[FP])?\(\s*(\w+)\s*,\s*(\w+)\s*\)", source.read_text())}
    return names.union(*(re.findall(r"add_test\(NAME\s+(\w+\.\w+)", listing.read_text())
                         for listing in directory.rglob("CMakeLists.txt")))


def read_rows(page: Path) -> list[tuple[int, str]]:
    """The rows of the page's tables, without their header."""
    lines = page.read_text().splitlines()
    below = [*lines[1:], ""]
    return [(number, line) for number, (line, next_line) in enumerate(zip(lines, below), start=1)
            if line.startswith("| ") and not next_line.startswith("|---")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("page", type=Path)
    parser.add_argument("build", type=Path)
    parser.add_argument("programs", type=Path, nargs="+")
    parser.add_argument("--not-built", type=Path, nargs="*", default=[])
    options = parser.parse_args()
    known = set(re.findall(r"Test +#\d+: ([\w/.]+)", run_command("ctest", "-N", "--test-dir", options.build)))
    known |= {re.sub(r"(\.\w+)\.\w+$", r"\1", name) for name in known}
    known = known.union(*map(list_tests, options.programs), *map(find_declared_tests, options.not_built))
    rows = read_rows(options.page)
    errors = [] if rows else [f"{options.page}: no table"]
    for number, row in rows:
        named = re.findall(r"`([^`]+)`", row.strip().strip("|").split(" | ")[-1])
        if not named:
            errors.append(f"{options.page}:{number}: the last cell must cite a test")
        errors += [f"{options.page}:{number}: there is no test {name}" for name in named if name not in known]
    sys.exit("\n".join(errors) or 0)


if __name__ == "__main__":
    main()
