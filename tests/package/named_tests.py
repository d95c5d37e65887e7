"""Pages promise things by naming the test that holds them: every test that a page names is there.

    named_tests.py MEZZO
"""

import pathlib
import re
import sys

DEFINITION = re.compile(r"\b(?:TYPED_)?TEST(?:_[FP])?\(\s*(\w+)\s*,\s*(\w+)\s*\)|NAME (\w+)\.(\w+)")
MENTION = re.compile(r"`(\w+\.[A-Z]\w+)`")


def main():
    root = pathlib.Path(sys.argv[1])
    tests = set()
    for path in (root / "tests").rglob("*"):
        if path.suffix in (".cpp", ".h", ".txt"):
            for match in DEFINITION.finditer(path.read_text(encoding="utf-8")):
                tests.add(".".join(part for part in match.groups() if part))
    named = 0
    missing = []
    for page in [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "examples").rglob("*.md")]:
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            for name in MENTION.findall(line):
                named += 1
                if name not in tests:
                    missing.append(f"{page.relative_to(root)}:{number} names the test {name}, which is not there")
    print("\n".join(missing) or f"{named} tests are named, and all are there")
    return 1 if missing or not named else 0


sys.exit(main())
