"""Call functions with equal kernels, some of them created late, some from another thread."""

import threading

import numpy as np
import synkhronos as synk

synk.fork()
import theano
import theano.tensor as tt

x, y = tt.fmatrix("x"), tt.fmatrix("y")
w = theano.shared(np.ones((2, 2), "float32"))
results = []


def make(x):
    outputs = [(x * w.sum() + 1, "gather"), (x.sum(axis=0), "sum")]
    return synk.function([x], outputs, updates=[(w, w + 1)])


def call(f):
    results.append(f(np.ones((3, 2), "float32"))[0][0, 0])


f, g = make(x), make(y)
synk.distribute()
call(f), call(g)
late = make(x)  # workers unpickle it in a separate thread, when its kernels are already in the cache
call(late), call(f)
in_thread = threading.Thread(target=lambda: (call(g), call(make(y))))
in_thread.start()
in_thread.join()
assert results == [5, 9, 13, 17, 21, 25], results
assert (synk.gather(w) == 7).all()
