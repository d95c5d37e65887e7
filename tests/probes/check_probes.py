"""check_probes.py DOCUMENT... TESTS: every test that a DOCUMENT names is one of the folder TESTS.

Each row of its tables names at least one, as `Suite.Test` or as ctest knows it.
"""
import re
import sys
from pathlib import Path


def tests_in(folder: Path) -> set[str]:
    names = set()
    for source in folder.rglob("*.cpp"):
        pattern = r"\b(?:TYPED_)?TEST(?:_[FP])?\(\s*(\w+)\s*,\s*(\w+)\s*\)"
        names.update(f"{suite}.{test}" for suite, test in re.findall(pattern, source.read_text()))
    for listing in folder.rglob("CMakeLists.txt"):
        names.update(re.findall(r"add_test\(NAME\s+(\w+\.\w+)", listing.read_text()))
    names.update(f"illegal/{source.stem}"
                 for source in folder.glob("compile_fail/*.cpp"))
    return names


def rows_of(document: Path) -> list[tuple[int, str]]:
    """Rows of tables, without the line of headings and the one below it."""
    lines = document.read_text().splitlines()
    below = [*lines[1:], ""]
    return [(number, line) for number, (line, next_line) in enumerate(zip(lines, below), start=1)
            if line.startswith("| ") and not next_line.startswith("|---")]


def errors_of(document: Path, known: set[str]) -> list[str]:
    errors = []
    rows = rows_of(document)
    if not rows:
        errors.append(f"{document}: there is no table")
    for number, row in rows:
        cells = row.strip().strip("|").split(" | ")
        named = re.findall(r"`([^`]+)`", cells[-1])
        if len(cells) != 3 or not named:
            errors.append(f"{document}:{number}: a row is a probe or a fault, a result or a promise, and its tests")
        errors += [f"{document}:{number}: there is no test {name}"
                   for name in named if name not in known]
    return errors


def main() -> int:
    *documents, folder = map(Path, sys.argv[1:])
    known = tests_in(folder)
    errors = [error for document in documents for error in errors_of(document, known)]
    print("\n".join(errors) or "every test that is named exists")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
