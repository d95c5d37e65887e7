#!/usr/bin/env python3
"""finish_api.py DIR: replaces dead links in Doxygen's pages by their text.

Doxygen lists friends without a comment, and headings of classes that EXCLUDE_SYMBOLS hides, but writes no anchors for them.
"""

import pathlib
import re
import sys

LINK = re.compile(r'<a (?:class="el" )?href="([^"#:]*)#([^"]+)">(.*?)</a>', re.S)

directory = pathlib.Path(sys.argv[1])
pages = {path.name: path.read_text(encoding="utf-8") for path in directory.glob("*.html")}
anchors = {name: set(re.findall(r'(?:id|name)="([^"]+)"', text)) for name, text in pages.items()}
for name, text in pages.items():
    finished = LINK.sub(
        lambda link: link[0] if link[2] in anchors.get(link[1] or name, {link[2]}) else link[3], text)
    if finished != text:
        (directory / name).write_text(finished, encoding="utf-8")
