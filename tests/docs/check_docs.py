#!/usr/bin/env python3
"""Checks the documentation.

    check_docs.py links ROOT            links inside the repository have a target, including headings
    check_docs.py readme ROOT           the README has at most 110 lines and starts with code; it and docs/install.md clone from the
                                        address in CMakeLists.txt; the citation has the current version
    check_docs.py status ROOT           docs/install.md has the compatibility table of tests/compat/results.md, and begins with its
                                        versions of libtorch
    check_docs.py errors ROOT LIBTORCH  headings of docs/errors.md are messages of mezzo or libtorch

Prints each fault, and exits with 1 if there is one.
"""

import pathlib
import re
import sys

MOST_LINES = 110

LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.M | re.S)


def list_pages(root):
    return sorted(page for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "tests/**/*.md", "benchmarks/**/*.md")
                  for page in root.glob(pattern) if ".deps" not in page.parts and "build" not in page.parts)


def get_anchors(page):
    """The anchors of a page's headings on GitHub and in MkDocs."""
    anchors = set()
    for heading in re.findall(r"^#+ (.+?)\s*$", FENCED.sub("", page.read_text(encoding="utf-8")), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchors.add(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    return anchors


def check_links(root):
    faults, count = [], 0
    for page in list_pages(root):
        text = FENCED.sub(lambda fence: "\n" * fence[0].count("\n"), page.read_text(encoding="utf-8"))
        for number, line in enumerate(text.splitlines(), 1):
            for target in LINK.findall(re.sub(r"`[^`]*`", "", line)):
                if re.match(r"[a-z]+:", target):
                    continue
                count += 1
                file, _, anchor = target.partition("#")
                path = (page.parent / file).resolve() if file else page
                if not path.exists():
                    faults.append(f"{page}:{number}: {target} does not exist")
                elif anchor and path.suffix == ".md" and anchor not in get_anchors(path):
                    faults.append(f"{page}:{number}: {file or page.name} has no heading #{anchor}")
    return faults if count else [f"{root}: no page has a link"]


def check_readme(root):
    text = (root / "README.md").read_text(encoding="utf-8")
    faults = []
    lines = text.count("\n")
    if lines > MOST_LINES:
        faults.append(f"README.md has {lines} lines; at most {MOST_LINES} are allowed; move some to docs/")
    if "```diff\n" not in text or text[:text.index("```diff\n")].count("\n") > 6:
        faults.append("README.md: no diff block in its first lines")
    address = re.search(r'HOMEPAGE_URL "(.+?)"', (root / "CMakeLists.txt").read_text(encoding="utf-8"))[1]
    for name in ("README.md", "docs/install.md"):
        cloned = set(re.findall(r"(?:git clone|GIT_REPOSITORY) (\S+)", (root / name).read_text(encoding="utf-8")))
        if cloned != {address}:
            faults.append(f"{name} clones from {sorted(cloned)}; CMakeLists.txt has {address}")
    version = re.findall(r"define MEZZO_VERSION_[A-Z]+ (\d+)", (root / "include/mezzo/base/version.h").read_text())
    if f"version: {'.'.join(version)}\n" not in (root / "CITATION.cff").read_text(encoding="utf-8"):
        faults.append(f"CITATION.cff does not have version {'.'.join(version)}")
    for command in ("./bootstrap bert-ner", "./bootstrap test"):
        if command not in text:
            faults.append(f"README.md: {command} is missing")
    return faults


def check_status(root):
    install, minimum = ((root / name).read_text(encoding="utf-8") for name in ("docs/install.md", "cmake/MezzoTorch.cmake"))
    results = (root / "tests/compat/results.md").read_text(encoding="utf-8")
    rows = [line for line in results.split("\n\n")[1].splitlines() if line.startswith("| ")]
    faults = [f"docs/install.md lacks a row of tests/compat/results.md: {row}" for row in rows if row not in install.splitlines()]
    libtorch = next((row for row in rows if row.startswith("| libtorch |")), "")
    tested = set(re.findall(r"\b\d+\.\d+", libtorch.rsplit("|", 2)[0]))
    named = set(re.findall(r"\b2\.\d+", install.split("\n\n")[1]))
    wanted = {*tested, re.search(r"set\(MEZZO_MINIMUM_TORCH_VERSION (\S+)\)", minimum)[1]}
    if not tested:
        faults.append("tests/compat/results.md has no version of libtorch that passes")
    if named != wanted:
        faults.append(f"docs/install.md begins with libtorch {sorted(named)}; accepted and tested are {sorted(wanted)}")
    return faults


# --- docs/errors.md ---------------------------------------------------------------------------------------------------

LITERAL = r'"(?:[^"\\]|\\.)*"'
# What stands for inserted text in a heading: dots, quoted text, numbers, dtypes.
INSERTED = re.compile(r"""\.\.\.|…|"[^"]*"|'[^']*'|`|\b[\d.]*\d\b|\b(?:BFloat16|Half|Float|float|Double)\b""")


def message_headings(page):
    """(line, text) of the headings that have no subheadings: each is an error message."""
    text = FENCED.sub(lambda fence: "\n" * fence[0].count("\n"), page.read_text(encoding="utf-8"))
    headings = [(number, len(found[1]), found[2]) for number, line in enumerate(text.splitlines(), 1)
                if (found := re.match(r"(#+) (.+)$", line))]
    levels = [level for _, level, _ in headings[1:]] + [0]
    return [(number, heading) for (number, level, heading), next_level in zip(headings, levels) if next_level <= level]


def read_string_literals(root):
    """The text of all string literals in mezzo's headers; adjacent literals are joined."""
    texts = []
    for source in sorted((root / "include/mezzo").rglob("*")):
        if source.suffix in {".h", ".cuh", ".cu", ".cpp"}:
            code = re.sub(r"^\s*//.*$", "", source.read_text(encoding="utf-8"), flags=re.M)
            for run in re.finditer(rf"(?:{LITERAL}\s*)+", code):
                texts.append("".join(literal[1:-1] for literal in re.findall(LITERAL, run[0])))
    return re.sub(r"\s+", " ", "\n".join(texts).replace("\\n", " ").replace('\\"', '"'))


def coverage(heading, has):
    """The share of a heading's words that are in runs of three words, or as many as inserted text leaves together, with has(run)."""
    total, covered = 0, 0
    for part in INSERTED.split(heading):
        words = part.strip(" ,;:()[]").split()
        length = min(3, len(words))
        runs = [i for i in range(len(words) - length + 1) if words and has(" ".join(words[i:i + length]))]
        covered += len({i + j for i in runs for j in range(length)})
        total += len(words)
    return covered / total if total else 0


def check_errors(root, torch):
    """Each heading of docs/errors.md without subheadings is a message of mezzo's headers or of libtorch's libraries."""
    mezzo = read_string_literals(root)
    libtorch = [(torch / "lib" / name).read_bytes() for name in ("libtorch_cpu.so", "libc10.so")]
    headings = message_headings(root / "docs/errors.md")
    faults = [f"docs/errors.md:{number}: neither mezzo nor libtorch throws: {heading}" for number, heading in headings
              if coverage(heading, lambda run: run in mezzo) < 0.6
              and coverage(heading, lambda run: any(run.encode() in library for library in libtorch)) < 0.6]
    return faults if headings else ["docs/errors.md has no headings"]


# --- docs/install.md, libtorch's internal API -------------------------------------------------------------------------

# Names of libtorch that are internal by namespace, underscore or header.
INTERNAL = re.compile(r"""\bat::(?:autocast|detail|native|sequence_number)::\w+|\bat::_\w+|\bat::RecordFunction::\w+_\b|
                          \bc10::(?:cuda::)?impl::(?:\w+::)*\w+|\bc10::Dispatcher\b|\bcaffe2::\w+::\w+|
                          \btorch::autograd::impl::\w+|\btorch::jit::\w+|\btorch::serialize::\w+::\w+_\b""", re.X)


def check_internals(root):
    """The table names what the headers use: each name occurs in each of its paths, and each internal name of the headers is in it."""
    page = (root / "docs/install.md").read_text(encoding="utf-8")
    section = re.search(r"^## libtorch's internal API\n(.*?)^## ", page, re.M | re.S)
    rows = [line.split(" | ") for line in section[1].splitlines() if line.startswith("| `")] if section else []
    code = {path: re.sub(r"//.*", "", path.read_text(encoding="utf-8")) for path in sorted((root / "include/mezzo").rglob("*.[hc]*"))}
    faults, listed = [], []
    for names, _, places, _ in rows:
        patterns = [re.escape(name).replace(r"\*", r"\w*") for name in re.findall(r"`([^`]+)`", names)]
        listed += patterns
        for place in re.findall(r"`([^`]+)`", places):
            texts = [text for path, text in code.items() if str(path.relative_to(root / "include/mezzo")).startswith(place)]
            if not any(re.search(rf"\b{pattern}\b", text) for pattern in patterns for text in texts):
                faults.append(f"docs/install.md: mezzo/{place} uses none of {names.strip('| ')}")
        faults += [f"docs/install.md: mezzo's headers do not use {pattern}" for pattern in patterns
                   if not any(re.search(rf"\b{pattern}\b", text) for text in code.values())]
    for path, text in code.items():
        faults += [f"{path.relative_to(root)} uses {name}, which the table of libtorch's internal API in docs/install.md lacks"
                   for name in sorted(set(INTERNAL.findall(text))) if not any(re.fullmatch(pattern, name) for pattern in listed)]
    return faults if rows else ["docs/install.md has no table of libtorch's internal API"]


def main():
    what, root, *more = sys.argv[1], *(pathlib.Path(argument).resolve() for argument in sys.argv[2:])
    checks = {"links": check_links, "readme": check_readme, "status": check_status, "errors": check_errors,
              "internals": check_internals}
    faults = checks[what](root, *more)
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
