"""Check which NCCL calls are made by collectives on many variables."""

import numpy as np
import synkhronos as synk
from nccl_calls import calls

n = synk.fork()
import theano

many = [theano.shared(np.full(size, size, "float32")) for size in range(1, 40)]
half = theano.shared(np.full((2, 2), 2, "float16"))
f = synk.function([], updates=[(one, one + 1) for one in [*many, half]])
synk.distribute()
synk.all_reduce([*many, half], "sum")
assert calls() == [["all_reduce", str(sum(range(1, 40)))], ["all_reduce", "4"]], calls()
assert all((one.get_value() == n * one.get_value().size).all() for one in many)
synk.broadcast(many)
synk.all_gather(many[0])
before = calls()
assert [name for name, _ in before[2:]] == ["broadcast", "all_gather"], before
synk.set_value(1, many[1], np.ones(7, "float32"))
for collective in (synk.all_reduce, synk.reduce):
    try:
        collective([many[2], many[1]], "sum")
    except ValueError as error:
        assert "(7,)" in str(error)
    else:
        raise AssertionError("no error")
assert calls() == before
synk.all_gather(many[1])  # shapes differ, so each rank broadcasts its array
assert [name for name, _ in calls()[4:]] == ["broadcast"] * n
