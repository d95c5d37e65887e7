#!/usr/bin/env python3
"""Checks that the documentation keeps what it promises.

    check_docs.py links ROOT       every link inside the repository leads somewhere, headings included
    check_docs.py readme ROOT      the README has at most 110 lines and begins with code; it and docs/install.md clone from the
                                   address in CMakeLists.txt, and the citation has the present version
    check_docs.py status ROOT      docs/install.md has the rows of tests/compat/results.md, and begins with the versions of
                                   libtorch in it
    check_docs.py errors ROOT      docs/errors.md has every message that a header can throw
    check_docs.py errors ROOT --write    adds those that it lacks, and drops those that are gone

Prints what is wrong, and exits with 1.
"""

import pathlib
import re
import sys

MOST_LINES = 110

LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.M | re.S)


def pages_of(root):
    return sorted(page for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "tests/**/*.md", "benchmarks/**/*.md")
                  for page in root.glob(pattern) if ".deps" not in page.parts and "build" not in page.parts)


def anchors_of(page):
    """The headings of a page as GitHub and MkDocs name them in links."""
    anchors = set()
    for heading in re.findall(r"^#+ (.+?)\s*$", FENCED.sub("", page.read_text(encoding="utf-8")), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchors.add(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    return anchors


def check_links(root):
    faults, count = [], 0
    for page in pages_of(root):
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
                elif anchor and path.suffix == ".md" and anchor not in anchors_of(path):
                    faults.append(f"{page}:{number}: {file or page.name} has no heading #{anchor}")
    return faults if count else [f"{root}: no page has a link"]


def check_readme(root):
    text = (root / "README.md").read_text(encoding="utf-8")
    faults = []
    lines = text.count("\n")
    if lines > MOST_LINES:
        faults.append(f"README.md has {lines} lines; it has at most {MOST_LINES}: move what is over to docs/")
    if "```diff\n" not in text or text[:text.index("```diff\n")].count("\n") > 6:
        faults.append("README.md: its first screen has no code")
    address = re.search(r'HOMEPAGE_URL "(.+?)"', (root / "CMakeLists.txt").read_text(encoding="utf-8"))[1]
    for name in ("README.md", "docs/install.md"):
        cloned = set(re.findall(r"(?:git clone|GIT_REPOSITORY) (\S+)", (root / name).read_text(encoding="utf-8")))
        if cloned != {address}:
            faults.append(f"{name} clones from {sorted(cloned)}; CMakeLists.txt has {address}")
    version = re.findall(r"define MEZZO_VERSION_[A-Z]+ (\d+)", (root / "include/mezzo/base/version.h").read_text())
    if f"version: {'.'.join(version)}\n" not in (root / "CITATION.cff").read_text(encoding="utf-8"):
        faults.append(f"CITATION.cff: its version is not {'.'.join(version)}")
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
    said = set(re.findall(r"\b2\.\d+", install.split("\n\n")[1]))
    wanted = {*tested, re.search(r"set\(MEZZO_MINIMUM_TORCH_VERSION (\S+)\)", minimum)[1]}
    if not tested:
        faults.append("tests/compat/results.md: it has no version of libtorch that passes")
    if said != wanted:
        faults.append(f"docs/install.md begins with libtorch {sorted(said)}; accepted and tested are {sorted(wanted)}")
    return faults


# --- The messages of errors -------------------------------------------------------------------------------------------

CALL = re.compile(r"\bTORCH_CHECK(?:_[A-Z]+)?\(")
LITERAL = r'"((?:[^"\\]|\\.)*)"'
ROW = re.compile(r"^\| `(.+?)` \| (.*) \|$")
GAP = "…"


def arguments_of(text, begin):
    """The arguments of the call whose parenthesis opens before `begin`."""
    arguments, current, depth, i = [], "", 1, begin
    while depth:
        character = text[i]
        if character == '"':
            end = re.compile(r'"(?:[^"\\]|\\.)*"').match(text, i).end()
            current += text[i:end]
            i = end
            continue
        if character == "'":
            end = re.compile(r"'(?:[^'\\]|\\.)+'").match(text, i).end()
            current += text[i:end]
            i = end
            continue
        if text.startswith("//", i):
            i = text.index("\n", i)
            continue
        depth += (character in "([{") - (character in ")]}")
        if depth == 1 and character == ",":
            arguments.append(current.strip())
            current = ""
        elif depth:
            current += character
        i += 1
    return [*arguments, current.strip()]


def messages_of(root):
    """{room: messages}, what is put in at run time being a gap. Left out are messages that are all gap: those are made
    elsewhere in the headers, of parts that no script can put together."""
    rooms = {}
    include = root / "include/mezzo"
    for header in sorted(include.rglob("*")):
        if header.suffix not in {".h", ".cuh"}:
            continue
        text = header.read_text(encoding="utf-8")
        for call in CALL.finditer(text):
            parts = []
            for argument in arguments_of(text, call.end())[1:]:
                is_literal = re.fullmatch(rf"(\s*{LITERAL}\s*)+", argument)
                parts.append("".join(re.findall(LITERAL, argument)) if is_literal else GAP)
            message = re.sub(f"{GAP}(\\s*{GAP})*", GAP, "".join(parts))
            message = re.sub(r"\s+", " ", message.replace("\\n", " ").replace('\\"', '"')).strip()
            message = message.replace("`", "").replace("|", "/")
            if len(re.sub(rf"[{GAP}\W]", "", message)) > 8:
                rooms.setdefault(header.relative_to(include).parts[0], {}).setdefault(message, None)
    return {room: list(messages) for room, messages in rooms.items()}


def rows_of(page):
    return dict(row.groups() for row in map(ROW.match, page.read_text(encoding="utf-8").splitlines()) if row)


IMPERATIVE = re.compile(r"""(add|begin|build|call|cast|change|choose|clip|clone\(\)|construct|copy|count|end|erase|freeze|give|hold|
    initialise|keep|leave|let|link|load|make|move|name|pass|put|raise|read|register|run|save|set|start|step|take|time|train|unset|
    update|use|write|(it|they)\ (should|must))\b""", re.X)


def split(message):
    """A message, and what it says itself is to be done; nothing where that is for a person to write."""
    for mark in ("; ", ". In C++: ", ". ", ": "):
        if mark in message:
            words, remedy = (part.strip() for part in message.rsplit(mark, 1))
            remedy = remedy.rstrip(".")
            if IMPERATIVE.match(remedy[0].lower() + remedy[1:]) and len(remedy) > 8:
                return words, remedy[0].upper() + remedy[1:] + "."
    return message, ""


def shown(messages):
    """{what the page shows of a message: what the message says is to be done}. A message is shown without its remedy,
    unless another one has the same words before a remedy of its own."""
    rows = {}
    for message in messages:
        words, remedy = split(message)
        alone = len({split(other)[1] for other in messages if split(other)[0] == words}) == 1
        rows[words if alone and " " in words and len(re.sub(r"[^a-z]", "", words)) > 5 else message] = remedy
    return rows


def first_words(message):
    """What a message is looked up by: its words from the first on that stand in every one of its kind."""
    return re.sub(rf"^[{GAP}\W]+", "", message).lower()


def errors_page(root, known):
    introduction = re.split(r"\n## \w+/\n", (root / "docs/errors.md").read_text(encoding="utf-8"), maxsplit=1)[0].rstrip()
    text = [introduction]
    for room, messages in sorted(messages_of(root).items()):
        text.append(f"\n## {room}/\n\n| message | what to do |\n|---|---|")
        rows = shown(messages)
        text += [f"| `{words}` | {known.get(words) or rows[words]} |" for words in sorted(rows, key=first_words)]
    return "\n".join(text) + "\n"


def check_errors(root, write):
    page = root / "docs/errors.md"
    known = rows_of(page)
    if write:
        page.write_text(errors_page(root, known), encoding="utf-8")
        known = rows_of(page)
    messages = {words for of_room in messages_of(root).values() for words in shown(of_room)}
    faults = [f"docs/errors.md lacks the message `{message}`; run check_docs.py errors . --write"
              for message in sorted(messages - known.keys())]
    faults += [f"docs/errors.md has `{message}`, which nothing throws; run check_docs.py errors . --write"
               for message in sorted(known.keys() - messages)]
    faults += [f"docs/errors.md: say what to do about `{message}`" for message, remedy in known.items() if not remedy.strip()]
    return faults if messages else ["no header throws anything"]


def main():
    what, root = sys.argv[1], pathlib.Path(sys.argv[2]).resolve()
    if what == "errors":
        faults = check_errors(root, "--write" in sys.argv)
    else:
        faults = {"links": check_links, "readme": check_readme, "status": check_status}[what](root)
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
