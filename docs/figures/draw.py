#!/usr/bin/env python3
"""Draws the figures of the documentation as SVG, using only Python's standard library.

    draw.py            writes them next to this script
    draw.py --check    prints the figures that are out of date, and exits with 1

Each figure is computed here: float16 and bfloat16 by rounding to their bits of precision, the loss scale by the rule of
mezzo::GradScalerOptions. The one exception is bert_ner.svg, which shows the table of the README.
"""

import math
import pathlib
import random
import re
import struct
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STYLE = """<style>
  text { font: 14px system-ui, sans-serif; fill: #24292f }
  .small { font-size: 12px } .strong { font-weight: 600 }
  .axis, .grid { stroke: #8c959f; fill: none } .grid { stroke-opacity: .35 }
  .a { fill: #0969da } .b { fill: #bc4c00 } .c { fill: #1a7f37 } .d { fill: #8250df } .pale { fill-opacity: .25 }
  .line { fill: none; stroke-width: 2.5 } .line.a { stroke: #0969da } .line.b { stroke: #bc4c00 } .line.c { stroke: #1a7f37 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .a { fill: #58a6ff } .b { fill: #f0883e } .c { fill: #56d364 } .d { fill: #bc8cff }
    .line.a { stroke: #58a6ff } .line.b { stroke: #f0883e } .line.c { stroke: #56d364 }
  }
  .line.a, .line.b, .line.c { fill: none }
</style>"""


# --- Numbers ----------------------------------------------------------------------------------------------------------

def bfloat16(value):
    """`value` rounded to the nearest bfloat16, ties to even."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    bits += 0x7FFF + (bits >> 16 & 1)
    return struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))[0]


def stochastic_bfloat16(value, generator):
    """`value` rounded up or down to a bfloat16, with the probability that makes the mean right."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0] + generator.randrange(1 << 16)
    return struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))[0]


def float32(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


# --- Drawing ----------------------------------------------------------------------------------------------------------

class Figure:
    """Elements in pixels, y downwards."""

    def __init__(self, width, height, title):
        self.head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
                     f'aria-label="{title}">\n<title>{title}</title>\n{STYLE}')
        self.parts = []

    def text(self, x, y, words, classes="", anchor="start"):
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}" text-anchor="{anchor}">{words}</text>')

    def box(self, x, y, width, height, classes):
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="{classes}"/>')

    def line(self, x1, y1, x2, y2, classes="axis"):
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{classes}"/>')

    def path(self, points, classes):
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{corners}" class="line {classes}"/>')

    def svg(self):
        return "\n".join([self.head, *self.parts, "</svg>\n"])


def power(exponent):
    digits = str(exponent).replace("-", "\u2212")
    return f'2<tspan dy="-5" font-size="10">{digits}</tspan>'


def ranges():
    """Which numbers each type holds, on an axis of powers of two."""
    figure = Figure(760, 250, "Ranges of float32, bfloat16 and float16")
    lowest, highest = -152, 130
    at = lambda exponent: 130 + (exponent - lowest) * 600 / (highest - lowest)
    types = [("float32", -149, -126, 128, 24, "a"), ("bfloat16", -133, -126, 128, 8, "c"), ("float16", -24, -14, 16, 11, "b")]
    for row, (name, smallest, normal, end, precision, color) in enumerate(types):
        y = 40 + 55 * row
        figure.text(20, y + 16, name, "strong")
        figure.text(20, y + 32, f"{precision} bits of precision", "small")
        figure.box(at(smallest), y, at(normal) - at(smallest), 24, f"{color} pale")
        figure.box(at(normal), y, at(end) - at(normal), 24, color)
    for exponent in (-149, -126, -100, -50, -24, -14, 0, 16, 50, 100, 128):
        figure.line(at(exponent), 30, at(exponent), 196, "grid")
        if exponent not in (-14, -149):
            figure.text(at(exponent), 214, power(exponent), "small", "middle")
    figure.text(at(-24) - 4, 186, "zero below", "small", "end")
    figure.text(at(16) + 5, 186, "infinity from 65520", "small")
    figure.text(380, 242, "magnitude; pale: subnormal, with fewer bits of precision the smaller the number", "small", "middle")
    return figure.svg()


def underflow():
    """Gradients distributed over powers of two: what float16 loses without a scale, and with 2^16."""
    figure = Figure(760, 330, "Gradients in float16, without and with a loss scale of 65536")
    mean, width = -22.0, 5.0
    share = lambda exponent: 0.5 * (1 + math.erf((exponent - mean) / (width * math.sqrt(2))))
    at = lambda exponent: 60 + (exponent + 44) * 660 / 64
    for row, scale in enumerate((0, 16)):
        base = 140 + row * 150
        for exponent in range(-44, 20):
            part = share(exponent + 1 - scale) - share(exponent - scale)
            lost = exponent < -25
            few = -25 <= exponent < -14
            color = "b" if lost else "d" if few else "c"
            height = part * 1100
            figure.box(at(exponent) + 1, base - height, at(1) - at(0) - 2, height, color)
        figure.line(at(-44), base, at(20), base)
        lost = share(-25 - scale)
        few = share(-14 - scale) - lost
        name = "no loss scale" if scale == 0 else "loss scale 65536"
        figure.text(64, base - 100, name, "strong")
        figure.text(64, base - 82, f"{100 * lost:.1f} % become zero,", "small")
        figure.text(64, base - 66, f"{100 * few:.1f} % lose precision", "small")
    for exponent in (-40, -32, -25, -14, 0, 16):
        figure.line(at(exponent), 20, at(exponent), 290, "grid")
        figure.text(at(exponent), 306, power(exponent), "small", "middle")
    figure.text(380, 326, "magnitude of a gradient in float16 (computed for a normal distribution of exponents)", "small",
                "middle")
    return figure.svg()


def rounding():
    """A weight of 1 that 4,000 updates of 2^-11 shrink by as much each, in float32 and two kinds of bfloat16."""
    figure = Figure(760, 330, "A weight under 4,000 small updates, in float32 and in bfloat16")
    generator = random.Random(0)
    rate, steps = 2.0 ** -11, 4000
    ways = {"a": float32, "b": bfloat16, "c": lambda value: stochastic_bfloat16(value, generator)}
    at = lambda step, value: (70 + step * 560 / steps, 270 - 240 * value)
    for value in (0, 0.25, 0.5, 0.75, 1):
        figure.line(70, at(0, value)[1], 630, at(0, value)[1], "grid")
        figure.text(62, at(0, value)[1] + 5, f"{value:g}", "small", "end")
    for step in (0, 1000, 2000, 3000, 4000):
        figure.text(at(step, 0)[0], 290, f"{step:,}", "small", "middle")
    names = {"a": "float32", "b": "bfloat16, rounded to nearest", "c": "bfloat16, stochastic rounding"}
    for row, (color, rounded) in enumerate(ways.items()):
        weight, points = 1.0, [at(0, 1.0)]
        for step in range(1, steps + 1):
            weight = rounded(weight - rate * weight)
            if step % 20 == 0:
                points.append(at(step, weight))
        figure.path(points, color)
        figure.box(300, 60 + 24 * row, 14, 14, color)
        figure.text(320, 72 + 24 * row, f"{names[color]}: ends at {weight:.3f}", "small")
    figure.text(350, 316, "steps; each takes 1/2048 of the weight away", "small", "middle")
    return figure.svg()


def staircase():
    """The loss scale by torch's rule, for gradients that fit into float16 up to a scale that slowly changes."""
    figure = Figure(760, 330, "A dynamic loss scale over 12,000 steps")
    generator = random.Random(3)
    scale, tracker, steps, interval = 16, 0, 12000, 1000
    at = lambda step, exponent: (70 + step * 640 / steps, 270 - 20 * (exponent - 8))
    points, skipped = [at(0, scale)], []
    for step in range(steps):
        bound = 18.6 - 6 * math.exp(-((step - 7000) / 1200) ** 2) + generator.gauss(0, 0.15)
        if scale > bound:
            skipped.append((step, scale))
            points.append(at(step, scale))
            scale, tracker = scale - 1, 0
            points.append(at(step, scale))
        else:
            tracker += 1
            if tracker == interval:
                points.append(at(step, scale))
                scale, tracker = scale + 1, 0
                points.append(at(step, scale))
    points.append(at(steps, scale))
    for exponent in range(8, 21, 2):
        figure.line(70, at(0, exponent)[1], 710, at(0, exponent)[1], "grid")
        figure.text(62, at(0, exponent)[1] + 5, power(exponent), "small", "end")
    for step in range(0, steps + 1, 2000):
        figure.text(at(step, 0)[0], 290, f"{step:,}", "small", "middle")
    figure.path(points, "a")
    for step, exponent in skipped:
        x, y = at(step, exponent)
        figure.box(x - 3, y - 12, 6, 6, "b")
    figure.box(90, 230, 8, 8, "b")
    figure.text(104, 238, f"skipped steps: {len(skipped)} of {steps:,}", "small")
    figure.text(390, 316, f"steps; growth interval {interval:,}; around step 7,000 gradients are larger", "small", "middle")
    return figure.svg()


def bert_ner():
    """The table of the README: speed and memory of each row."""
    table = re.search(r"\| name +\|.*?```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)[0]
    lines = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines() if line.startswith("|")]
    names, rows = lines[0], lines[2:]
    column = lambda name: [row[names.index(name)] for row in rows]
    figure = Figure(800, 40 + 44 * len(rows), "Fine-tuning BERT in six precisions: speed and peak memory")
    speeds = [float(cell) for cell in column("tokens/s")]
    memory = [float(cell.split()[0]) for cell in column("memory")]
    figure.text(260, 22, "tokens a second", "strong")
    figure.text(560, 22, "peak memory, MiB", "strong")
    for number, (name, score) in enumerate(zip(column("name"), column("F1"))):
        y = 38 + 44 * number
        figure.text(10, y + 14, name)
        figure.text(10, y + 29, f"F1 {score}", "small")
        figure.box(260, y, speeds[number] * 200 / max(speeds), 22, "a")
        figure.text(266 + speeds[number] * 200 / max(speeds), y + 16, f"{speeds[number]:,.0f}", "small")
        figure.box(560, y, memory[number] * 170 / max(memory), 22, "c")
        figure.text(566 + memory[number] * 170 / max(memory), y + 16, f"{memory[number]:,.0f}", "small")
    return figure.svg()


def main():
    different = []
    for draw in (ranges, underflow, rounding, staircase, bert_ner):
        path, drawn = HERE / f"{draw.__name__}.svg", draw()
        if "--check" not in sys.argv:
            path.write_text(drawn, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != drawn:
            different.append(f"{path} is out of date; run docs/figures/draw.py")
    print("\n".join(different), end="\n" if different else "")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
