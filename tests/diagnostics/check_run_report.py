#!/usr/bin/env python3
"""Looks at a RunReport's page in Chromium, as wide as a phone and as a desk, light and dark.

    check_run_report.py MEZZO_TESTS CHROMIUM [FOLDER]

Runs the test that writes the page. The page must not be wider than the screen, and what a screenshot shows must be a
page: its ground, text, a curve and marks of skipped steps, in the colours of the reader's setting. FOLDER keeps the
screenshots.
"""

import collections
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile
import zlib

FRAME = """<!doctype html><iframe src=run.html style="border:0;width:{0}px;height:900px" onload="document.title =
this.contentDocument.documentElement.scrollWidth"></iframe>"""

# Ground, card, text, curve, mark: those of kReportStyle in telemetry.h.
COLOURS = {"light": ["#f6f7f9", "#ffffff", "#1c2330", "#2458c5", "#d2452f"],
           "dark": ["#12161d", "#1a202a", "#e4e8ef", "#79a6ff", "#ff7d66"]}
MARK_OPACITY = 0.7


def browse(browser, *arguments):
    return subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                           "--allow-file-access-from-files", "--virtual-time-budget=2000", *arguments],
                          check=True, capture_output=True, text=True, timeout=100).stdout


def check_width(browser, folder, width):
    """The page, laid out at so many pixels, is not wider."""
    (folder / "frame.html").write_text(FRAME.format(width), encoding="utf-8")
    shown = browse(browser, "--dump-dom", (folder / "frame.html").as_uri())
    found = re.search(r"<title>(\d+)</title>", shown)
    assert found, shown
    assert int(found[1]) <= width, f"a page {found[1]} wide on a screen of {width}"


def pixels(png):
    """(width, height, {(red, green, blue): how many}) of a PNG of 8 bits a channel."""
    at, data = 8, b""
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        chunk = png[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colour = struct.unpack(">IIBB", chunk[:10])
            assert depth == 8 and colour in (2, 6), (depth, colour)
        data += chunk if kind == b"IDAT" else b""
        at += length + 12
    each = {2: 3, 6: 4}[colour]
    raw, stride, before, count = zlib.decompress(data), width * each, bytearray(width * each), collections.Counter()
    for row in range(height):
        start = row * (stride + 1)
        line = unfiltered(raw[start], bytearray(raw[start + 1 : start + 1 + stride]), before, each)
        count.update(zip(line[0::each], line[1::each], line[2::each]))
        before = line
    return width, height, count


def unfiltered(kind, line, before, each):
    """A line of a PNG as it was before its filter."""
    for i in range(len(line) if kind else 0):
        left, up, corner = (line[i - each], before[i], before[i - each]) if i >= each else (0, before[i], 0)
        if kind == 4:
            guess = left + up - corner
            nearest = min((abs(guess - left), 0, left), (abs(guess - up), 1, up), (abs(guess - corner), 2, corner))[2]
            line[i] = (line[i] + nearest) & 0xFF
        else:
            line[i] = (line[i] + {1: left, 2: up, 3: (left + up) // 2}[kind]) & 0xFF
    return line


def rgb(text):
    return tuple(int(text[i : i + 2], 16) for i in (1, 3, 5))


def check_screenshot(browser, folder, width, scheme):
    path = folder / f"run_{width}_{scheme}.png"
    browse(browser, f"--screenshot={path}", f"--window-size={width},900",
           f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}", (folder / "run.html").as_uri())
    shown_width, height, count = pixels(path.read_bytes())
    assert (shown_width, height) == (width, 900), (shown_width, height)
    ground, card, ink, curve, mark = map(rgb, COLOURS[scheme])
    seen = {"ground": count[ground], "card": count[card], "text": count[ink], "curve": count[curve]}
    blended = tuple(round(MARK_OPACITY * m + (1 - MARK_OPACITY) * c) for m, c in zip(mark, card))
    seen["mark"] = sum(n for colour, n in count.items() if max(abs(a - b) for a, b in zip(colour, blended)) <= 3)
    least = {"ground": 0.02, "card": 0.3, "text": 0.0002, "curve": 0.0001, "mark": 0.0001}
    for name, share in least.items():
        assert seen[name] >= share * width * height, (width, scheme, name, seen)


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(sys.argv[3] if len(sys.argv) > 3 else name)
        subprocess.run([sys.argv[1], "--gtest_filter=MetricsFiles.HoldWhatWasRecorded", "--gtest_brief=1"],
                       check=True, env={**os.environ, "MEZZO_METRICS_DIRECTORY": str(folder)})
        for width in (390, 1280):
            check_width(sys.argv[2], folder, width)
            for scheme in COLOURS:
                check_screenshot(sys.argv[2], folder, width, scheme)
        print("looked at")


if __name__ == "__main__":
    main()
