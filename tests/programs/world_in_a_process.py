"""Create a world in a process of `multiprocessing`, and then another one in the main process.

The arguments are the start method of that process, and whether it closes its world.
"""

import multiprocessing
import signal
import sys

import synkhronos as synk
from prelude import all_gone_within, open_world


def work(results, closes):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
    world = open_world(3)
    world.check_usable()
    results.put(world.workers())
    if closes:
        synk.close()


if __name__ == "__main__":
    method, closes = sys.argv[1:]
    context = multiprocessing.get_context(method)
    results = context.SimpleQueue()
    process = context.Process(target=work, args=(results, closes == "True"))
    process.start()
    workers = results.get()
    process.join(20)
    assert process.exitcode == 0, process.exitcode
    assert len(workers) == 2 and all_gone_within(workers, 2)
    open_world().check_usable()
