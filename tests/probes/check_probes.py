"""check_probes.py DOCUMENT TESTS: every test that DOCUMENT names is one of the folder TESTS.

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
    names.update(f"autocast/illegal/{source.stem}"
                 for source in folder.glob("autocast/compile_fail/*.cpp"))
    return names


def rows_of(document: Path) -> list[tuple[int, str]]:
    lines = enumerate(document.read_text().splitlines(), start=1)
    return [(number, line) for number, line in lines
            if line.startswith("| ") and not line.startswith("| Probe |")]


def main() -> int:
    document, folder = map(Path, sys.argv[1:])
    known = tests_in(folder)
    errors = []
    for number, row in rows_of(document):
        cells = row.strip().strip("|").split(" | ")
        named = re.findall(r"`([^`]+)`", cells[-1])
        if len(cells) != 3 or not named:
            errors.append(f"{document}:{number}: a row is a probe, a result and its tests")
        errors += [f"{document}:{number}: there is no test {name}"
                   for name in named if name not in known]
    print("\n".join(errors) or f"{document}: every test that it names exists")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
