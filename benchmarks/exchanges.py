"""exchanges: the leaders' exchange on two machines, against OpenMPI's blocking and nonblocking one.

The machines are network namespaces, as in the row `machines`, without a limit and with 1 Gbit/s. All
take turns in jobs with a process per machine. OpenMPI's nonblocking all-reduce is polled, as the leaders
poll, with each of its algorithms in a job of its own; the table has the fastest of them for each size.
"""

import functools

import common
import machines as row

import numpy as np

KB, MB = 1 << 10, 1_000_000
SIZES = {"64 kB": 64 * KB, "1 MB": MB, "25 MB": 25 * MB, "100 MB": 100 * MB}
#: Values of ``coll_libnbc_iallreduce_algorithm``
ALGORITHMS = {"ring": 1, "binomial": 2, "Rabenseifner": 3, "recursive doubling": 4}
KINDS = {"ours": "reduce", "blocking": "blocking", "nonblocking": "nonblocking"}


def main():
    common.main(__doc__, measure, draw)


def times_of(nbytes):
    """Return how often an all-reduce is repeated in a turn, and in which groups it is timed."""
    return (100, 10) if nbytes < MB else (20, 2) if nbytes < 10 * MB else (2, 1)


def measure(options):
    from namespaces import Machines, why_no_mpi, why_no_namespaces

    why_not = why_no_mpi() or why_no_namespaces()
    if why_not:
        raise SystemExit(f"exchanges: this row needs machines made of namespaces: {why_not}")
    rounds, times = 2 if options.quick else 5, {}
    with Machines(2) as made:
        for algorithm, number in ALGORITHMS.items():
            mpi = ["--mca", "coll_libnbc_iallreduce_algorithm", str(number)]
            job = row.MpiJob(made, "leaders", mpi=mpi)
            try:
                for limit in (None, row.LIMITED):
                    if limit is not None:
                        made.limit(limit)
                    turns = {
                        (kind, name, limit): functools.partial(job, what, (size, times_of(size)))
                        for name, size in SIZES.items()
                        for kind, what in KINDS.items()
                    }
                    taken = common.take_turns(turns, rounds, f"exchanges, {algorithm}")
                    times.update({(algorithm, *key): found for key, found in taken.items()})
                made.limit(None)
            finally:
                job.close()
    return common.Result("an exchange of two machines, float32", lines(times), notes(rounds))


def lines(times):
    found = []
    for limit, words in ((None, ""), (row.LIMITED, ", 1 Gbit/s")):
        for name in SIZES:
            polled = {one: times[one, "nonblocking", name, limit] for one in ALGORITHMS}
            best = min(polled, key=lambda one: np.median(polled[one]))
            ours, blocking = (times[best, kind, name, limit] for kind in ("ours", "blocking"))
            found += [
                common.line(f"{name}{words}: leaders", "ms", ours, blocking, "blocking"),
                common.line(f"{name}{words}: OpenMPI, blocking", "ms", blocking),
                common.line(
                    f"{name}{words}: OpenMPI, nonblocking, {best}", "ms", polled[best], ours, "leaders"
                ),
            ]
    return found


def notes(rounds):
    return [
        f"{rounds} rounds in each of {len(ALGORITHMS)} jobs.",
        "The limit is tbf's, on what a machine sends.",
    ]


def draw(figure, result):
    compared = [one for one in result["lines"] if one["ratio"] is not None]
    axes = figure.add_subplot()
    axes.barh([one["what"] for one in compared], [one["ratio"] for one in compared])
    axes.axvline(1, color="black")
    axes.set_xlabel("time, relative to that of what the table compares it with")


if __name__ == "__main__":
    main()
