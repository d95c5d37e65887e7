#!/usr/bin/env python3
"""Checks that links, images, scripts and anchors of the built site resolve, and that no page loads anything from a network.

    check_site.py DIRECTORY PATH    the output of docs/site/build (build/docs/site), and the path of its URL (/mezzo/), with which
                                    links of the 404 page begin

Prints each fault, and exits with 1 if there is one.
"""

import html.parser
import pathlib
import re
import sys
import urllib.parse

# Attributes that a browser loads without a click.
FETCHED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.anchors, self.links, self.fetched, self.base = {"", "top"}, set(), set(), ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors.update(value for name in ("id", "name") if (value := values.get(name)))
        if tag == "base":
            self.base = values.get("href") or ""
        for name in ("href", "src"):
            if tag == "base" or not values.get(name):
                continue
            self.links.add(values[name])
            if (tag, name) in FETCHED and values.get("rel") not in ("canonical", "prev", "next", "edit"):
                self.fetched.add(values[name])


def check(site, root):
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    faults, count = [], 0
    for path, page in pages.items():
        name = path.relative_to(site)
        for link in sorted(page.links):
            if re.match(r"(https?:)?//", link):
                if link in page.fetched:
                    faults.append(f"{name}: fetches {link} from a network")
                continue
            if re.match(r"[a-z]+:", link):
                continue
            count += 1
            file, _, anchor = link.partition("#")
            file = urllib.parse.unquote(file.partition("?")[0])
            if file.startswith(root):
                target = site / file.removeprefix(root)
            else:
                target = (path.parent / page.base / file).resolve() if file else path
            if target.is_dir():
                target /= "index.html"
            if site not in (target, *target.parents) or not target.exists():
                faults.append(f"{name}: {link} does not exist in the site")
            elif target in pages and not {anchor, urllib.parse.unquote(anchor)} & pages[target].anchors:
                faults.append(f"{name}: {link} has no such anchor")
    print(f"{len(pages)} pages, {count} links, {len(faults)} faults")
    return faults if count else [f"{site}: no page has a link"]


if __name__ == "__main__":
    found = check(pathlib.Path(sys.argv[1]).resolve(), sys.argv[2])
    print("\n".join(found))
    sys.exit(1 if found else 0)
