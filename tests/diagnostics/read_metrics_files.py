#!/usr/bin/env python3
"""Reads the files of CsvWriter, TensorBoardWriter and RunReport in Python.

    read_metrics_files.py MEZZO_TESTS

Runs the test that writes the files, and compares the CSV file with the event file, which an independent reader
decodes, and `tensorboard` too if it is installed. check_run_report.py renders the page in a browser.
"""

import csv
import html.parser
import math
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def check_crc(data, stored):
    crc = crc32c(data)
    masked = (((crc >> 15) | (crc << 17 & 0xFFFFFFFF)) + 0xA282EAD8) & 0xFFFFFFFF
    assert masked == struct.unpack("<I", stored)[0], "wrong checksum"


def messages(data):
    """Yields the payloads of a TFRecord file."""
    while data:
        check_crc(data[:8], data[8:12])
        (length,) = struct.unpack("<Q", data[:8])
        message = data[12 : 12 + length]
        check_crc(message, data[12 + length : 16 + length])
        yield message
        data = data[16 + length :]


def varint(data, at):
    value, shift = 0, 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at


def fields(message):
    """Yields (number, value) of each field of a protocol buffer."""
    at = 0
    while at < len(message):
        key, at = varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = varint(message, at)
        else:
            length = {1: 8, 5: 4}.get(kind)
            if length is None:
                assert kind == 2, f"wire type {kind}"
                length, at = varint(message, at)
            value, at = message[at : at + length], at + length
        yield number, value


def events(path):
    """Returns {(step, tag): value} of an event file."""
    scalars = {}
    for number, message in enumerate(messages(path.read_bytes())):
        event = dict(fields(message))
        assert struct.unpack("<d", event[1])[0] > 1.7e9, "wall time"
        if number == 0:
            assert event[3] == b"brain.Event:2"
            continue
        for kind, value in fields(event[5]):
            assert kind == 1
            summary = dict(fields(value))
            scalars[event[2], summary[1].decode()] = struct.unpack("<f", summary[2])[0]
    return scalars


def tensorboard_scalars(directory):
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        return None
    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {(e.step, tag): e.value for tag in accumulator.Tags()["scalars"] for e in accumulator.Scalars(tag)}


def same(a, b, tolerance=0.0):
    return a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= tolerance * abs(a)


def check_equal(scalars, rows):
    numbers = 0
    for row in rows:
        for tag in row.keys() - {"step", "wall_time"}:
            numbers += 1
            assert same(row[tag], scalars[int(row["step"]), tag], 1e-6), (row["step"], tag)
    assert numbers == len(scalars), (numbers, len(scalars))


class Page(html.parser.HTMLParser):
    """Counts elements, and fails for those that load a resource."""

    def __init__(self):
        super().__init__()
        self.count = {}

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        assert tag not in {"script", "link", "img", "iframe"}, tag
        assert not {"src", "href", "srcset"} & {name for name, _ in attrs}, attrs


def check_page(text):
    assert not re.search(r"https?:|url\(|@import", text), "the page loads a resource"
    page = Page()
    page.feed(text)
    assert page.count["svg"] == 5, page.count
    assert "prefers-color-scheme:dark" in text


def main():
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        subprocess.run([sys.argv[1], "--gtest_filter=MetricsFiles.ContainRecordedSteps", "--gtest_brief=1"],
                       check=True, env={**os.environ, "MEZZO_METRICS_DIRECTORY": name})
        with open(directory / "run.csv", newline="", encoding="ascii") as file:
            rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]

        assert len(rows) == 40
        (path,) = (directory / "events").iterdir()
        check_equal(events(path), rows)
        tensorboard = tensorboard_scalars(directory / "events")
        if tensorboard is not None:
            check_equal(tensorboard, rows)
        check_page((directory / "run.html").read_text(encoding="utf-8"))
        print("read" + ("" if tensorboard is None else ", by tensorboard too"))


if __name__ == "__main__":
    main()
