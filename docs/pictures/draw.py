"""Draws the pictures of the documentation, each for light and for dark pages.

    python docs/pictures/draw.py             # into this folder

Which rows go where, and the results of operations, are computed by the library's own arithmetic; the
times are those in ``benchmarks/results``. Every picture is described in its own file, for readers who
cannot see it.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

from synkhronos.arithmetic.operations import OPERATIONS
from synkhronos.arithmetic.partition import select, share
from synkhronos.profiles.drawing import COLORS as CATEGORY_COLORS
from synkhronos.profiles.log import CATEGORIES

SHADES = {
    "light": {"paper": "#ffffff", "ink": "#1f2328", "muted": "#6b7280", "empty": "#e5e7eb"},
    "dark": {"paper": "#131416", "ink": "#e6e6e6", "muted": "#9ca3af", "empty": "#33363b"},
}
#: The colors of cells by rank, also told apart by people who see no red or green.
RANKS = ["#2563c9", "#c2570c", "#0f8a5f"]
#: The same for lines and text on dark paper.
BRIGHT = dict(zip(RANKS, ["#7aa7f5", "#f0965a", "#4cc79b"]))
SETTINGS = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "synkhronos",  # the same drawing has the same bytes
    "font.size": 10,
}
UNIT = 0.36  # inches per unit of the coordinates: the size of a cell


class Drawing:
    """A figure whose coordinates are cells, with the origin at the top left."""

    def __init__(self, shade, width, height):
        self.colors = SHADES[shade]
        self.lines = {**self.colors, **(BRIGHT if shade == "dark" else {})}
        self.figure = Figure(figsize=(width * UNIT, height * UNIT), facecolor=self.colors["paper"])
        self.axes = self.figure.add_axes([0, 0, 1, 1])
        self.axes.set(xlim=(0, width), ylim=(height, 0))
        self.axes.axis("off")

    def text(self, x, y, text, color="ink", align="left", **keywords):
        color = self.lines.get(color, color)
        self.axes.text(x, y, text, color=color, ha=align, va="center", **keywords)

    def code(self, x, y, text):
        self.text(x, y, text, family="monospace")

    def cell(self, x, y, label, color, width=1):
        filled = color != "empty"
        box = FancyBboxPatch(
            (x + 0.06, y + 0.06),
            width - 0.12,
            0.88,
            boxstyle="round,pad=0,rounding_size=0.12",
            facecolor=self.colors.get(color, color),
            edgecolor="none",
        )
        self.axes.add_patch(box)
        self.text(x + width / 2, y + 0.52, label, "#ffffff" if filled else "muted", "center")

    def band(self, x, y, width, color, height=0.6):
        box = Rectangle((x, y), width, height, facecolor=color, edgecolor="none")
        self.axes.add_patch(box)

    def cells(self, x, y, labels, color):
        for position, label in enumerate(labels):
            self.cell(x + position, y, str(label), color)

    def arrow(self, start, end, color="muted"):
        style = {"arrowstyle": "-|>", "color": self.lines.get(color, color), "linewidth": 1.2}
        self.axes.annotate("", xy=end, xytext=start, arrowprops=style)

    def frame(self, x, y, width, height, color="muted"):
        box = FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.15",
            facecolor="none",
            edgecolor=self.lines.get(color, color),
            linewidth=1.2,
        )
        self.axes.add_patch(box)


def parts(rows, n):
    """Return the part of the rows that each of `n` processes gets."""
    return [list(rows[slice(*share(len(rows), n, index))]) for index in range(n)]


def listed(rows):
    """Return row numbers as text."""
    return ", ".join(map(str, rows)) or "none"


def by_rank(rows_of_ranks):
    return "; ".join(f"rank {rank}: {listed(rows)}" for rank, rows in enumerate(rows_of_ranks))


def call(shade):
    """What a call does: the rows are split, every process computes, the results are combined."""
    rows = parts(range(10), 3)
    values = [float(np.mean(one)) for one in rows]
    lengths = [len(one) for one in rows]
    mean = OPERATIONS["avg"].reduce([np.array(one) for one in values], lengths)
    drawing = Drawing(shade, 15, 9.2)
    drawing.code(1.5, 0.7, "f(x)")
    drawing.text(3.6, 0.7, "x has 10 rows, f computes their mean", "muted")
    left = [0.4, 5.9, 10.4]
    middle = [x + (width + 0.4) / 2 for x, width in zip(left, (4, 3, 3))]
    start = 2.5
    for rank, one in enumerate(rows):
        color = RANKS[rank]
        drawing.cells(start, 1.3, one, color)
        drawing.arrow((start + len(one) / 2, 2.4), (middle[rank], 3.6), color)
        drawing.frame(left[rank], 3.7, len(one) + 0.4, 2.9, color)
        drawing.cells(left[rank] + 0.2, 3.9, one, color)
        name = "rank 0: your script" if not rank else f"rank {rank}: worker"
        drawing.text(middle[rank], 5.35, name, align="center", fontsize=9)
        drawing.text(middle[rank], 6.05, f"mean {values[rank]:g}", color="muted", align="center")
        drawing.arrow((middle[rank], 6.7), (7.5 + (rank - 1) * 0.9, 7.7), color)
        start += len(one)
    weighted = " + ".join(f"{n} · {value:g}" for n, value in zip(lengths, values))
    drawing.text(7.5, 8.2, f"({weighted}) / {sum(lengths)} = {mean:g}", align="center", weight="bold")
    drawing.text(7.5, 8.9, "the mean of all rows, back in your script", "muted", "center")
    text = (
        f"A call of a function on 10 rows and 3 processes. The rows are split: {by_rank(rows)}. Each "
        f"process computes the mean of its rows: {listed(values)}. The script gets their average, "
        f"weighted by the numbers of rows: {mean:g}."
    )
    return drawing.figure, text


def batches(shade):
    """Which rows each process takes, for several batches."""
    calls = {
        "f(x)": None,
        "f(x, batch=5)": 5,
        "f(x, batch=slice(1, 10, 2))": slice(1, 10, 2),
        "f(x, batch=[7, 0, 3, -1])": [7, 0, 3, -1],
        "f(x, batch=mask)": np.arange(10) % 4 == 0,
    }
    drawing = Drawing(shade, 14, 2.4 * len(calls) + 1.2)
    for rank in range(3):
        drawing.cell(0.3 + 2.6 * rank, 0.15, f"rank {rank}", RANKS[rank], 2.4)
    drawing.cell(0.3 + 2.6 * 3, 0.15, "not used", "empty", 2.8)
    texts = []
    for line, (code, batch) in enumerate(calls.items()):
        y = 2.4 * line + 1.9
        rows = parts(select(batch, 10), 3)
        drawing.code(0.35, y, code)
        for row in range(10):
            owner = [rank for rank, one in enumerate(rows) if row in one]
            drawing.cell(0.3 + row, y + 0.45, str(row), RANKS[owner[0]] if owner else "empty")
        for rank, one in enumerate(rows):
            place = y + 0.25 + 0.6 * rank
            drawing.text(10.7, place, f"{rank}: {listed(one)}", RANKS[rank], fontsize=9)
        texts.append(f"{code}: {by_rank(rows)}")
    return drawing.figure, "The rows of 10 that each of 3 processes takes. " + ". ".join(texts) + "."


def slices(shade):
    """How the rows of each process are computed on in slices."""
    rows = parts(range(10), 2)
    drawing = Drawing(shade, 14, 7.4)
    drawing.code(0.35, 0.6, "f(x, num_slices=3)")
    texts = []
    for rank, one in enumerate(rows):
        drawing.cells(0.3 + one[0], 1.1, one, RANKS[rank])
    for rank, one in enumerate(rows):
        y, x = 3.0 + 2.4 * rank, 2.4
        drawing.text(0.35, y + 0.5, f"rank {rank}", RANKS[rank])
        pieces = parts(one, 3)
        for number, piece in enumerate(pieces):
            drawing.frame(x, y - 0.1, len(piece) + 0.2, 1.2, RANKS[rank])
            drawing.cells(x + 0.1, y, piece, RANKS[rank])
            place = x + len(piece) / 2 + 0.1
            drawing.text(place, y + 1.5, f"slice {number + 1}", "muted", "center", fontsize=9)
            x += len(piece) + 0.9
        drawing.text(x - 0.3, y + 0.5, "accumulated", "muted", fontsize=9)
        texts.append(f"rank {rank}: " + ", then ".join(listed(piece) for piece in pieces))
    return drawing.figure, "10 rows on 2 processes in 3 slices each. " + "; ".join(texts) + "."


def scattered(shade):
    """Rows in the replicas of a shared variable, and what ``batch_s`` selects of them."""
    rows = parts(range(8), 3)
    drawing = Drawing(shade, 14, 11.2)
    drawing.code(0.35, 0.6, "synk.scatter(s, x)")
    drawing.text(0.35, 1.7, "x")
    texts = ["Eight rows scattered to 3 processes: " + by_rank(rows)]
    start = 2.2
    for rank, one in enumerate(rows):
        drawing.cells(start, 1.2, one, RANKS[rank])
        start += len(one)

    def replicas(y, code, batches):
        drawing.code(0.35, y, code)
        for rank, one in enumerate(rows):
            x = 2.2 + 3.9 * rank
            used = [one[row] for row in select(batches[rank], len(one))]
            drawing.text(x, y + 0.75, f"s on rank {rank}", RANKS[rank], fontsize=9)
            for position, row in enumerate(one):
                color = RANKS[rank] if row in used else "empty"
                drawing.cell(x + position, y + 1.1, str(row), color)
            texts.append(f"{code} on rank {rank}: {listed(used)}")

    replicas(3.3, "f()", [None] * 3)
    replicas(6.1, "f(batch_s=slice(0, 2))", [slice(0, 2)] * 3)
    replicas(8.9, "f(batch_s=[[2], slice(1, 3), slice(0, 1)])", [[2], slice(1, 3), slice(0, 1)])
    return drawing.figure, ". ".join(texts) + "."


def collectives(shade):
    """The replicas of a variable before and after each collective."""
    values = [1, 2, 6]
    arrays = [np.array(float(value)) for value in values]
    total = f"{OPERATIONS['sum'].reduce(arrays):g}"
    mean = f"{OPERATIONS['avg'].reduce(arrays, [1, 1, 1]):g}"
    every = ["1", "2", "6"]
    lines = [
        ("broadcast(s)", ["1"] * 3),
        ("all_reduce(s)", [mean] * 3),
        ('all_reduce(s, op="sum")', [total] * 3),
        ('reduce(s, op="sum")', [total, *every[1:]]),
        ("all_gather(s)", ["1 2 6"] * 3),
        ("gather(s)", every),
    ]
    drawing = Drawing(shade, 14, 2.15 * len(lines) + 1.9)
    drawing.text(0.35, 0.6, "before")
    drawing.text(7.2, 0.6, "after")
    texts = []
    for line, (code, after) in enumerate(lines):
        y = 2.15 * line + 1.9
        drawing.code(0.35, y - 0.4, f"synk.{code}")
        for rank, color in enumerate(RANKS):
            drawing.cell(0.3 + 1.3 * rank, y, every[rank], color, 1.2)
            drawing.cell(7.1 + 2 * rank, y, after[rank], color, 1.9)
        drawing.arrow((4.7, y + 0.5), (6.7, y + 0.5))
        text = f"{code}: {', '.join(after)}"
        if code == "gather(s)":
            drawing.text(7.15, y - 0.4, "returns 1 2 6 to the script", "muted", fontsize=9)
            text += ", and the script gets 1 2 6"
        texts.append(text)
    return drawing.figure, (
        f"A variable whose replicas on ranks 0, 1 and 2 are {', '.join(every)}, and the replicas "
        f"after each collective. {'. '.join(texts)}."
    )


def step(shade):
    """The parts of a training step on each process."""
    rows = parts(range(100, 164), 2)
    drawing = Drawing(shade, 15, 6.6)
    drawing.code(0.35, 0.6, "train_minibatch(x, y, batch=slice(100, 164))")
    for rank, one in enumerate(rows):
        y = 1.9 + 1.9 * rank
        drawing.text(0.35, y + 0.5, f"rank {rank}", RANKS[rank])
        drawing.cell(2.3, y, f"gradient, rows {one[0]}–{one[-1]}", RANKS[rank], 5.8)
        drawing.cell(11.2, y, "update", RANKS[rank], 3)
    drawing.frame(8.3, 1.8, 2.7, 3.1)
    drawing.text(9.65, 3.05, "all-reduce:", align="center", fontsize=9)
    drawing.text(9.65, 3.7, "average", align="center", fontsize=9)
    drawing.arrow((2.3, 5.6), (14.2, 5.6))
    drawing.text(2.3, 6.15, "time", "muted")
    drawing.text(14.2, 6.15, "the same parameters on both", "muted", "right", fontsize=9)
    return drawing.figure, (
        f"A training step on 2 processes. Rank 0 computes the gradient on rows {rows[0][0]} to "
        f"{rows[0][-1]}, rank 1 on rows {rows[1][0]} to {rows[1][-1]}. An all-reduce averages the "
        f"gradients. Then both apply the same update, and have the same parameters."
    )


def speed(shade):
    """The times of two training steps, from the benchmarks."""
    rows = {"step_small": "Lasagne's MNIST CNN, 500 images", "step_large": "ResNet-50, 8 images"}
    names = {
        "Theano untouched": "Theano, both cores",
        "Theano, 1 thread, memory kept": "Theano, one core¹",
        "PyTorch DDP, 2 processes": "PyTorch DDP, 2 processes",
        "Theano's operations, synk": "Synkhronos²",
        "synkhronos, 2 ranks": "Synkhronos, 2 processes",
        "ideal, 2": "without waiting³",
    }
    drawing = Drawing(shade, 14, 19.5)
    drawing.text(0.35, 0.6, "Training steps per second, relative to Theano", weight="bold")
    medians = {}
    for row in rows:
        results = json.loads((ROOT / "benchmarks" / "results" / f"{row}.json").read_text())
        times = [
            next(line["samples"] for line in results["lines"] if line["what"].startswith(start))
            for start in names
        ]
        medians[row] = [(np.median(np.divide(times[0], one)), np.median(one)) for one in times]
    scale = 4.9 / max(ratio for each in medians.values() for ratio, _ in each)
    texts, y = [], 1.6
    for row, title in rows.items():
        drawing.text(0.35, y + 0.2, title)
        for position, (name, (ratio, time)) in enumerate(zip(names.values(), medians[row])):
            top, end = y + 0.8 + 1.05 * position, 5.5 + scale * ratio
            color = RANKS[0] if name == "Synkhronos, 2 processes" else "empty"
            drawing.text(5.3, top + 0.5, name, align="right", fontsize=9)
            drawing.cell(5.5, top, "", color, scale * ratio)
            drawing.text(end + 0.2, top + 0.5, f"{ratio:.2f} ×", fontsize=9, weight="bold")
            drawing.text(end + 1.6, top + 0.5, f"({time:.0f} ms)", "muted", fontsize=9)
            texts.append(f"{title}, {name}: {ratio:.2f} times, {time:.0f} ms")
        y += 7.6
    machine = results["machine"]
    cores, date = f"{machine['cores']} cores of an {machine['cpu']}", results["date"][:10]
    drawing.text(0.35, y + 0.2, f"Medians of rounds on {cores}, {date}.", "muted", fontsize=9)
    drawing.text(0.35, y + 0.85, "¹ one BLAS thread; malloc keeps freed memory.", "muted", fontsize=9)
    drawing.text(0.35, y + 1.5, "² two processes, only Theano's own operations", "muted", fontsize=9)
    drawing.text(
        0.35, y + 2.15, "³ two processes with half of the rows each, on their own", "muted", fontsize=9
    )
    return drawing.figure, f"Speed relative to Theano on {cores}: " + "; ".join(texts) + "."


def timeline(shade):
    """The timeline of a profile: one rank is slower, and the others wait for it."""
    work = [(30, 47, 33), (29, 48, 31), (31, 46, 32)]  # milliseconds of each rank in three steps
    load, copy, reduce, update, other = 5, 2, 4, 3, 1
    colors = CATEGORY_COLORS
    drawing = Drawing(shade, 18, 5.6)
    scale, waits, lengths = 0.06, [0] * 3, [0] * 3
    x = 1.9
    for name in CATEGORIES:
        drawing.band(x, 0.45, 0.5, colors[name])
        drawing.text(x + 0.65, 0.75, name, fontsize=9)
        x += 2.55
    begin = 0
    for each in work:
        meet = begin + load + copy + max(each)
        for rank, own in enumerate(each):
            spans = [("load", load)] if rank == 0 else [("", load)]
            spans += [("copy", copy), ("compute", own), ("wait", max(each) - own)]
            spans += [("reduce", reduce), ("compute", update), ("other", other)]
            waits[rank] += max(each) - own
            lengths[rank] += sum(length for name, length in spans if name)
            place = begin
            for name, length in spans:
                if name:
                    left, top = 1.9 + scale * place, 1.7 + 1.15 * rank
                    drawing.band(left, top, scale * length, colors[name], 0.8)
                place += length
        begin = meet + reduce + update + other + 2
    slowest, texts = int(np.argmin(waits)), []
    for rank in range(3):
        share = f"waits {waits[rank] / lengths[rank]:.0%}"
        share += f", for rank {slowest}" if rank != slowest else ""
        drawing.text(0.35, 2.1 + 1.15 * rank, f"rank {rank}")
        drawing.text(1.9 + scale * begin + 0.1, 2.1 + 1.15 * rank, share, fontsize=9)
        texts.append(f"rank {rank} {share}")
    drawing.text(1.9, 5.25, f"{begin - 2} ms, three steps", "muted", fontsize=9)
    return drawing.figure, (
        "A timeline of three steps on three ranks. Rank 1 computes for longer than the others, which "
        "wait for it before each reduction; rank 0 also loads the rows: " + ", ".join(texts) + "."
    )


PICTURES = [call, batches, slices, scattered, collectives, step, speed, timeline]


def save(picture, shade, path):
    """Draw one of `PICTURES` for light or dark pages, and write it to a file."""
    with matplotlib.rc_context(SETTINGS):
        figure, text = picture(shade)
        figure.savefig(path, format="svg", metadata={"Description": text, "Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=HERE, help="where to write them")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for picture in PICTURES:
        for shade in SHADES:
            save(picture, shade, folder / f"{picture.__name__}.{shade}.svg")


if __name__ == "__main__":
    main()
