"""growth_machines: all-reduces between 2 to 8 leaders, and a model of training on up to 1024 machines.

The machines are network namespaces, joined by links of 100 Mbit/s, so that the links and not the cores
of this machine are the limit. The constants are fitted to two machines, and the model is tried on four
and eight. Then it says how well training would scale with 4 GPUs a machine and 25 Gbit/s, for networks
whose step time is published (TensorFlow's benchmarks for a P100, 64 images), beside Horovod's published
results (docs/benchmarks). As in Horovod, gradients travel while others are computed;
the lines "not overlapped" are without that.
"""

import os
from pathlib import Path

import common
import machines as row
from common import COLOURS, Line

import numpy as np

TRIED = (4, 8)
RATE, BITS, BURST = "100mbit", 1e8, "32k"
KB, MB = 1 << 10, 1_000_000
SIZES = {"4 B": 4, "4 kB": 4 * KB, "64 kB": 64 * KB, "1 MB": MB, "25 MB": 25 * MB}
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
UNLIMITED = ("5 MB", "102 MB")  # sizes of the row `machines`
FORETOLD = (2, 8, 32, 128, 1024)
NETWORK, GPUS, IMAGES = 25e9, 4, 64  # bits per second; GPUs a machine; images of a step on each
FORWARD = 1 / 3  # of the time of a gradient
BUCKET = 4 << 20  # bytes

# Bytes of the parameters in float32, and images a second on one P100:
# www.tensorflow.org/performance/benchmarks
NETWORKS = {"Inception V3": (95.4e6, 142), "ResNet-50": (102e6, 219), "VGG-16": (553e6, 154)}
# Efficiency by the number of machines: Horovod's README of 2017, and its docs/benchmarks
HOROVOD = {"Inception V3": {32: 0.90, 128: 0.90}, "VGG-16": {32: 0.79, 128: 0.68}}


def main():
    common.main(__doc__, measure, draw)


# The model. All times are seconds.


def rounds(machines):
    """Return the rounds of a meeting of the leaders."""
    return (machines - 1).bit_length()


def is_small(machines, nbytes):
    """Return whether an array is part of the meeting."""
    from synkhronos.comms.linked import SMALL

    return nbytes <= SMALL // max(machines - 1, 1)


def model_all_reduce(machines, nbytes, constants, a_byte):
    """Return the time of an all-reduce between leaders; `a_byte` is the time to send one."""
    meeting = rounds(machines) * constants["round"]
    if is_small(machines, nbytes):
        return meeting + (machines - 1) * nbytes * a_byte
    sent = 2 * nbytes * (machines - 1) / machines
    others = constants["message"] * (machines - 2)
    return meeting + 2 * (constants["round"] + others) + sent * a_byte


def model_call(machines, constants):
    """Return the time of a call with one rank on each machine: the master tells each other one."""
    return constants["call"] + constants["message"] * (machines - 2)


def buckets(name):
    """Return the bytes of each bucket, and the share of the backward pass after which it is full.

    For VGG-16 from its layers, whose times are as their operations; for the others evenly.
    """
    nbytes, _ = NETWORKS[name]
    if name != "VGG-16":
        number = round(nbytes / BUCKET)
        return [(nbytes / number, (one + 1) / number) for one in range(number)]
    sides = [224] * 2 + [112] * 2 + [56] * 3 + [28] * 3 + [14] * 3
    maps = [3, 64, 64, 128, 128, *[256] * 3, *[512] * 6]
    layers = [(9 * one * other, side**2) for one, other, side in zip(maps, maps[1:], sides)]
    layers += [(one * other, 1) for one, other in ((25088, 4096), (4096, 4096), (4096, 1000))]
    work = sum(size * times for size, times in layers)
    found, filled, done = [], 0, 0
    for number, (size, times) in reversed(list(enumerate(layers))):
        filled, done = filled + 4 * size, done + size * times / work
        if filled >= BUCKET or number == 0:
            found.append((filled, done))
            filled = 0
    return found


def efficiency(machines, name, constants, overlapped=True, a_byte=None):
    """Return the speed of training with `GPUS` GPUs a machine, relative to as many alone."""
    nbytes, speed = NETWORKS[name]
    a_byte = 8 / NETWORK / constants["share of the limit"] if a_byte is None else a_byte
    computing = IMAGES / speed
    if machines == 1:
        return 1.0
    if overlapped:
        end = 0.0
        for size, share in buckets(name):
            ready = computing * (FORWARD + (1 - FORWARD) * share)
            end = max(end, ready) + model_all_reduce(machines, size, constants, a_byte)
    else:
        end = computing + model_all_reduce(machines, nbytes, constants, a_byte)
    return computing / (end + model_call(machines, constants))


def fit(median):
    """Return the constants from the medians on two machines, by (machines, what)."""
    constants = {what: median[2, what] for what in ("call", "message")}
    # A message is handled, and is on its way.
    constants["round"] = median[2, "round trip"] + constants["message"]
    small, large = (median[2, size] for size in UNLIMITED)
    lengths = [row.BYTES[size] for size in UNLIMITED]
    constants["a byte"] = (large - small) / (lengths[1] - lengths[0])
    limited = median[2, "25 MB"] - median[2, "1 MB"]
    constants["a limited byte"] = limited / (SIZES["25 MB"] - SIZES["1 MB"])
    constants["share of the limit"] = min(1.0, 8 / BITS / constants["a limited byte"])
    return constants


# The row


def times_of(nbytes):
    """Return how often an all-reduce is repeated in a turn, and in which groups it is timed."""
    return (1, 1) if nbytes > 10 * MB else (4, 2) if nbytes > 100 * KB else (40, 10)


def measure(options):
    from namespaces import Machines, why_no_mpi, why_no_namespaces

    why_not = why_no_mpi() or why_no_namespaces()
    if why_not:
        raise SystemExit(f"growth_machines: this row needs machines made of namespaces: {why_not}")
    turns, times = 3 if options.quick else 7, {}
    for count in (2, *TRIED):
        with Machines(count) as made:
            kinds = ("leaders", "call") if count == 2 else ("leaders",)
            jobs = {kind: row.MpiJob(made, kind) for kind in kinds}
            try:
                if count == 2:
                    times.update(_take_turns(_unlimited(jobs), turns, count, "no limit"))
                made.limit(RATE, BURST)
                times.update(_take_turns(_limited(jobs["leaders"]), turns, count, RATE))
            finally:
                for job in jobs.values():
                    job.close()
    median = {key: float(np.median(one)) for key, one in times.items()}
    constants = fit(median)
    extra = {"constants": constants}
    lines = _lines(times, constants)
    return common.Result("machines, and a model", lines, _notes(constants), extra)


def _take_turns(turns, number, count, title):
    found = common.take_turns(turns, number, f"{count} machines, {title}")
    return {(count, *key): one for key, one in found.items()}


def _unlimited(jobs):
    turns = {(size,): lambda size=size: jobs["leaders"]("ours", size) for size in UNLIMITED}
    turns["round trip",] = lambda: jobs["leaders"]("round trip", None)
    turns["message",] = lambda: jobs["leaders"]("message", None)
    turns["call",] = lambda: jobs["call"]("call")
    return turns


def _limited(job):
    asked = {size: (nbytes, times_of(nbytes)) for size, nbytes in SIZES.items()}
    return {(size,): lambda one=one: job("reduce", one) for size, one in asked.items()}


def _lines(times, constants):
    lines, a_byte = [], constants["a limited byte"]
    for size, nbytes in SIZES.items():
        for count in (2, *TRIED):
            samples = [1e3 * one for one in times[count, size]]
            line = Line(f"{size}, {RATE}: {count} leaders", "ms", samples)
            model = 1e3 * model_all_reduce(count, nbytes, constants, a_byte)
            line.ratios, line.of = [one / model for one in samples], "model"
            lines.append(line)
    for what in ("round trip", "message", "call"):
        lines.append(common.line(what + ", 2 machines", "µs", times[2, what]))
    for size in UNLIMITED:
        lines.append(common.line(f"{size}, no limit: 2 leaders", "ms", times[2, size]))
    for name in NETWORKS:
        for count in FORETOLD:
            said = HOROVOD.get(name, {}).get(count)
            for overlapped, words in ((True, ""), (False, ", not overlapped")):
                share = efficiency(count, name, constants, overlapped)
                line = Line(f"{name}, {count} machines, the model{words}", "%", [100 * share])
                if said:
                    line.ratios, line.of = [share / said], "Horovod"
                    line.goal, line.reached = ("≥ 1", share >= said) if overlapped else ("", None)
                lines.append(line)
    return lines


def _notes(constants):
    c = {name: 1e6 * value for name, value in constants.items()}
    notes = [
        f"an all-reduce of B bytes on M machines, L(M) = ceil(log2 M): a meeting of "
        f"{c['round']:.1f} L(M) µs, with (M - 1) g B for arrays that are part of it; then, for "
        f"others, 2 · ({c['round']:.1f} + {c['message']:.1f} (M - 2)) µs + 2 g B (M - 1) / M; g is the "
        f"network's time divided by {constants['share of the limit']:.3f}, and "
        f"{1e3 * c['a byte']:.2f} ns without a limit",
        f"a call: {c['call']:.0f} + {c['message']:.1f} (M - 2) µs",
        f"the links have {RATE}, by tbf with a burst of {BURST}, and TCP the congestion control "
        f"{CONGESTION.read_text().strip()}; all leaders share the {os.cpu_count()} cores of this "
        f"machine, so small arrays, whose time is that of the processor, take longer than on machines "
        f"of their own",
        f"the model at 25 Gbit/s: {GPUS} GPUs a machine, {IMAGES} images on each, whose gradients are "
        f"reduced on the machine in no time; a forward pass takes a third of the time of a gradient; "
        f"the time of a byte is the network's",
    ]
    slow = constants["a byte"]
    for name in HOROVOD:
        share = efficiency(128, name, constants, a_byte=max(slow, 8 / NETWORK))
        notes.append(
            f"{name} on 128 machines whose leaders need as long for a byte as here without a limit, "
            f"with two leaders on two cores: {100 * share:.0f}%"
        )
    return notes


def draw(figure, result):
    constants = result["extra"]["constants"]
    axes = figure.add_subplot()
    counts = [1 << power for power in range(11)]
    colours = dict(zip(NETWORKS, (COLOURS["synk"], COLOURS["goal"], COLOURS["other"])))
    for name, colour in colours.items():
        for overlapped, style in ((True, "-"), (False, ":")):
            shares = [100 * efficiency(one, name, constants, overlapped) for one in counts]
            label = f"{name}, the model" if overlapped else None
            axes.plot(counts, shares, style, color=colour, label=label)
        said = HOROVOD.get(name)
        if said:
            axes.plot(list(said), [100 * one for one in said.values()], "o", color=colour,
                      label=f"{name}, Horovod has published")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(one) for one in counts])
    axes.set(ylim=(0, 105), ylabel="speed, % of as many alone")
    axes.set_xlabel("machines with 4 GPUs each, 25 Gbit/s; dotted: not overlapped")
    axes.legend(fontsize="small")


if __name__ == "__main__":
    main()
