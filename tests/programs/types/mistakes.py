"""Mistakes of a user's script that mypy finds; each line has the code of the error."""

import numpy as np
import theano
import theano.tensor as tt

import synkhronos as synk

x, w = tt.dmatrix("x"), theano.shared(np.zeros(2))

synk.fork("2")  # arg-type
synk.fork(2, gpu=True)  # call-arg
synk.frok(2)  # attr-defined

synk.function([x], (x.sum(), "total"))  # arg-type
synk.function([x], [x.mean(), (x.sum(), "summed")])  # list-item
synk.function([x], "x")  # arg-type
synk.function(["x"], x.mean())  # list-item
synk.function([x], x.mean(), updates=[(w, w + 1, "mean")])  # list-item
synk.Out(x, "concatenate")  # arg-type
f = synk.function([x], x.mean())
f(np.ones((2, 2)), num_slices="2")  # arg-type
f(np.ones((2, 2)), batch=0.5)  # arg-type
f.build_inputs()  # call-overload
f.distribute()  # attr-defined

rows = synk.data(np.ones((2, 2)), overside=2)  # call-arg
rows.set_length("all")  # arg-type
rows.shape = (3, 2)  # misc
print(rows.lenght)  # attr-defined
len(rows.data.shape.count)  # arg-type

synk.all_reduce(w, op="mean")  # arg-type
synk.all_reduce("w")  # arg-type
synk.broadcast(w, nvcl=False)  # call-arg
synk.gather([w], nd_up=2)  # call-overload
synk.get_value(w, 1)  # call-overload
print(synk.get_value(0, [w]).shape)  # attr-defined
print(synk.get_lengths([w])[0].total)  # attr-defined
synk.reduce([w], "sum", in_place=False).keys()  # attr-defined
print(synk.get_shmems(x).shpe)  # attr-defined
synk.size + 1  # operator

with synk.profile() as measured:
    f(rows)
measured.tabel()  # attr-defined
print(synk.extensions.train.make_training_function)  # attr-defined
synk.extensions.train.parallel_function([x], x.mean(), loss_op="mean")  # arg-type

try:
    f(rows)
except synk.WorkerError as error:
    error.rank.upper()  # attr-defined
