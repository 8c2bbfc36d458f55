"""growth_machines: all-reduces between 2 to 4 leaders, and a model of training on up to 1024 machines.

The constants are fitted to two machines, which are network namespaces, and the model is tried on three
and four. Then it says how well training would scale with 4 GPUs a machine and 25 Gbit/s, for networks
whose step time is published (TensorFlow's benchmarks for a P100, 64 images), beside Horovod's published
results (docs/benchmarks). In the model the ranks compute, then reduce; Horovod overlaps.
"""

import common
import machines as row
from common import COLOURS, Line

import numpy as np

TRIED = (3, 4)
SIZES = {"5 MB": 5_000_000, "102 MB": 102_000_000}
LIMITS = {"": None, ", 1 Gbit/s": 1e9}
FORETOLD = (2, 8, 32, 128, 1024)
NETWORK, GPUS, IMAGES = 25e9, 4, 64  # bits per second; GPUs a machine; images of a step on each

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


def model_all_reduce(machines, nbytes, constants, a_byte):
    """Return the time of an all-reduce between leaders; `a_byte` is the time to send one."""
    return (
        constants["all-reduce"]
        + constants["round"] * rounds(machines)
        + 2 * constants["message"] * (machines - 1)
        + 2 * a_byte * nbytes * (machines - 1) / machines
    )


def model_call(machines, constants):
    """Return the time of a call with one rank on each machine.

    The command travels along a binomial tree, in which the master tells up to two others itself.
    """
    if machines <= 3:
        return constants["call"] + constants["message"] * (machines - 2)
    return constants["call"] + (constants["message"] + constants["round"]) * (rounds(machines) - 1)


def efficiency(machines, name, constants):
    """Return the speed of training with `GPUS` GPUs a machine, relative to as many alone."""
    nbytes, speed = NETWORKS[name]
    a_byte = max(constants["a byte"], 8 / NETWORK / constants["share of the limit"])
    computing = IMAGES / speed
    if machines == 1:
        return 1.0
    other = model_call(machines, constants) + model_all_reduce(machines, nbytes, constants, a_byte)
    return computing / (computing + other)


def fit(median):
    """Return the constants from the medians on two machines, by (machines, what)."""
    constants = {what: median[2, what] for what in ("call", "message")}
    constants["round"] = median[2, "round trip"]
    fixed = constants["round"] + 2 * constants["message"]
    per_byte = {}
    for limit in LIMITS:
        small, large = (median[2, size + limit] for size in SIZES)
        nbytes = list(SIZES.values())
        per_byte[limit] = (large - small) / (nbytes[1] - nbytes[0])
        if not limit:
            constants["all-reduce"] = max(0.0, small - fixed - per_byte[limit] * nbytes[0])
    constants["a byte"] = per_byte[""]
    constants["a byte, 1 Gbit/s"] = per_byte[", 1 Gbit/s"]
    constants["share of the limit"] = min(1.0, 8 / 1e9 / per_byte[", 1 Gbit/s"])
    return constants


# The row


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
                for limit, bits in LIMITS.items():
                    if bits:
                        made.limit(row.LIMITED)
                    found = common.take_turns(_turns(jobs, limit), turns, f"{count} machines{limit}")
                    times.update({(count, what): one for what, one in found.items()})
            finally:
                for job in jobs.values():
                    job.close()
    median = {key: float(np.median(one)) for key, one in times.items()}
    constants = fit(median)
    extra = {"constants": constants}
    return common.Result("machines, and a model", _lines(times, constants), _notes(constants), extra)


def _turns(jobs, limit):
    turns = {size + limit: lambda size=size: jobs["leaders"]("ours", size) for size in SIZES}
    if not limit and "call" in jobs:
        turns["round trip"] = lambda: jobs["leaders"]("round trip", None)
        turns["message"] = lambda: jobs["leaders"]("message", None)
        turns["call"] = lambda: jobs["call"]("call")
    return turns


def _lines(times, constants):
    lines = []
    for limit in LIMITS:
        a_byte = constants["a byte" + limit]
        for size, nbytes in SIZES.items():
            for count in (2, *TRIED):
                line = Line(f"{size}{limit}: {count} leaders", "ms",
                            [1e3 * one for one in times[count, size + limit]])  # fmt: skip
                model = 1e3 * model_all_reduce(count, nbytes, constants, a_byte)
                line.ratios, line.of = [one / model for one in line.samples], "model"
                lines.append(line)
    for what in ("round trip", "message", "call"):
        lines.append(common.line(what + ", 2 machines", "µs", times[2, what]))
    for name in NETWORKS:
        for count in FORETOLD:
            said = HOROVOD.get(name, {}).get(count)
            line = Line(f"{name}, {count} machines, the model", "%",
                        [100 * efficiency(count, name, constants)])  # fmt: skip
            if said:
                line.ratios, line.of = [efficiency(count, name, constants) / said], "Horovod"
            lines.append(line)
    return lines


def _notes(constants):
    c = {name: 1e6 * value for name, value in constants.items()}
    return [
        f"all-reduce of B bytes on M machines: {c['all-reduce']:.0f} + {c['round']:.1f} L(M) + "
        f"2 · {c['message']:.1f} (M - 1) µs + 2 g B (M - 1) / M, L(M) = ceil(log2 M); "
        f"g is {1e3 * c['a byte']:.2f} ns without a limit, and the network's time divided by "
        f"{constants['share of the limit']:.2f} with one",
        f"a call: {c['call']:.0f} + {c['message']:.1f} (M - 2) µs up to 3 machines, then "
        f"{c['call']:.0f} + {c['message'] + c['round']:.1f} (L(M) - 1) µs",
        "three and four leaders share the two cores of this machine, so without a limit they are slower "
        "than on machines of their own",
        f"the model at 25 Gbit/s: {GPUS} GPUs a machine, {IMAGES} images on each, whose gradients are "
        f"reduced on the machine in no time; nothing is overlapped",
    ]


def draw(figure, result):
    constants = result["extra"]["constants"]
    axes = figure.add_subplot()
    counts = [1 << power for power in range(11)]
    colours = dict(zip(NETWORKS, (COLOURS["synk"], COLOURS["goal"], COLOURS["other"])))
    for name, colour in colours.items():
        axes.plot(counts, [100 * efficiency(one, name, constants) for one in counts], color=colour,
                  label=f"{name}, the model")  # fmt: skip
        said = HOROVOD.get(name)
        if said:
            axes.plot(list(said), [100 * one for one in said.values()], "o", color=colour,
                      label=f"{name}, Horovod has published")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(one) for one in counts])
    axes.set(ylim=(0, 105), ylabel="speed, % of as many alone")
    axes.set_xlabel("machines with 4 GPUs each, 25 Gbit/s")
    axes.legend(fontsize="small")


if __name__ == "__main__":
    main()
