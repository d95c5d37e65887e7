#!/usr/bin/env python3
"""Renders a RunReport in Chromium at phone and desktop widths, in light and dark mode.

    check_run_report.py MEZZO_TESTS CHROMIUM [DIRECTORY]

Runs the test that writes the page. The page must not be wider than the window, and a screenshot must contain
background, text, a curve and marks of skipped steps in the colors of the mode. DIRECTORY keeps the screenshots.
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

# Background, card, text, curve, mark: as in kReportCss of detail/html.h.
COLORS = {"light": ["#f6f7f9", "#ffffff", "#1c2330", "#2458c5", "#d2452f"],
           "dark": ["#12161d", "#1a202a", "#e4e8ef", "#79a6ff", "#ff7d66"]}
MARK_OPACITY = 0.7


def browse(browser, *arguments):
    return subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                           "--allow-file-access-from-files", "--virtual-time-budget=2000", *arguments],
                          check=True, capture_output=True, text=True, timeout=100).stdout


def check_width(browser, directory, width):
    """Checks that the page fits a window of this width."""
    (directory / "frame.html").write_text(FRAME.format(width), encoding="utf-8")
    shown = browse(browser, "--dump-dom", (directory / "frame.html").as_uri())
    found = re.search(r"<title>(\d+)</title>", shown)
    assert found, shown
    assert int(found[1]) <= width, f"the page is {found[1]} pixels wide in a window of {width}"


def pixels(png):
    """Returns (width, height, {(red, green, blue): count}) of a PNG with 8 bits per channel."""
    at, data = 8, b""
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        chunk = png[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, color = struct.unpack(">IIBB", chunk[:10])
            assert depth == 8 and color in (2, 6), (depth, color)
        data += chunk if kind == b"IDAT" else b""
        at += length + 12
    each = {2: 3, 6: 4}[color]
    raw, stride, before, count = zlib.decompress(data), width * each, bytearray(width * each), collections.Counter()
    for row in range(height):
        start = row * (stride + 1)
        line = unfiltered(raw[start], bytearray(raw[start + 1 : start + 1 + stride]), before, each)
        count.update(zip(line[0::each], line[1::each], line[2::each]))
        before = line
    return width, height, count


def unfiltered(kind, line, before, each):
    """Undoes the filter of a PNG row."""
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


def check_screenshot(browser, directory, width, scheme):
    path = directory / f"run_{width}_{scheme}.png"
    browse(browser, f"--screenshot={path}", f"--window-size={width},900",
           f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}", (directory / "run.html").as_uri())
    shown_width, height, count = pixels(path.read_bytes())
    assert (shown_width, height) == (width, 900), (shown_width, height)
    background, card, ink, curve, mark = map(rgb, COLORS[scheme])
    seen = {"background": count[background], "card": count[card], "text": count[ink], "curve": count[curve]}
    blended = tuple(round(MARK_OPACITY * m + (1 - MARK_OPACITY) * c) for m, c in zip(mark, card))
    seen["mark"] = sum(n for color, n in count.items() if max(abs(a - b) for a, b in zip(color, blended)) <= 3)
    least = {"background": 0.02, "card": 0.3, "text": 0.0002, "curve": 0.0001, "mark": 0.0001}
    for name, share in least.items():
        assert seen[name] >= share * width * height, (width, scheme, name, seen)


def main():
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(sys.argv[3] if len(sys.argv) > 3 else name)
        subprocess.run([sys.argv[1], "--gtest_filter=MetricsFiles.ContainRecordedSteps", "--gtest_brief=1"],
                       check=True, env={**os.environ, "MEZZO_METRICS_DIRECTORY": str(directory)})
        for width in (390, 1280):
            check_width(sys.argv[2], directory, width)
            for scheme in COLORS:
                check_screenshot(sys.argv[2], directory, width, scheme)
        print("rendered")


if __name__ == "__main__":
    main()
