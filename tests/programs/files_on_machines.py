"""Prints for each file how many bytes the master sends for its rows, in two calls, as JSON.

The arguments are files of arrays of one shape, of which other machines may have other ones, or none.
"""

import json
import sys

import synkhronos as synk
import numpy as np
from compilers import default_mode, tt
from synkhronos.machines.leaders import as_bytes


def main(files):
    synk.fork(4, use_gpu=False, timeout=60)
    x = tt.dmatrix("x")
    with default_mode("FAST_COMPILE"):
        total = synk.function([x], (x.sum(axis=0), "sum"))
    synk.distribute()
    total(np.ones((4, 2)))
    links, sizes = synk.world.world.current_world().transport.leaders.links, []
    send = links.send

    def counted(to, tag, data):
        sizes.append(as_bytes(data).size)
        return send(to, tag, data)

    links.send = counted
    sent = {}
    for path in files:
        rows = np.load(path, mmap_mode="r")
        data = synk.data(rows)
        sent[path] = []
        for batch in (None, slice(10, None)):
            sizes.clear()
            expected = rows[batch or slice(None)].sum(axis=0)
            np.testing.assert_array_equal(total(data, batch=batch), expected)
            sent[path].append(sum(sizes))
    links.send = send
    synk.close()
    print(json.dumps(sent))


if __name__ == "__main__":
    main(sys.argv[1:])
