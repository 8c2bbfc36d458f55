"""A training script as described by the MNIST page of 2017, compared with serial training.

The page describes the script without showing it. Data is written to shared memory once, and calls
select rows of it.
"""

import synkhronos as synk
import numpy as np
import theano
import theano.tensor as T

x, y = T.matrix("x"), T.ivector("y")
w = theano.shared(np.zeros((4, 3), "float32"), "w")
prediction = T.nnet.softmax(T.dot(x, w))
loss = T.nnet.categorical_crossentropy(prediction, y).mean()
accuracy = T.eq(prediction.argmax(axis=1), y).mean(dtype="float32")
updates = [(w, w - 0.5 * T.grad(loss, w))]
random = np.random.RandomState(0)
X, targets = random.randn(60, 4).astype("float32"), random.randint(0, 3, 60).astype("int32")


def iterate_minibatch_indices(n, batchsize, shuffle=False):
    indices = np.arange(n)
    if shuffle:
        np.random.RandomState(1).shuffle(indices)
    for start in range(0, n - batchsize + 1, batchsize):
        yield indices[start : start + batchsize] if shuffle else slice(start, start + batchsize)


synk.fork(2, use_gpu=False)
train_fn = synk.function([x, y], loss, updates=updates)
val_fn = synk.function([x, y], [loss, accuracy])
synk.distribute()
train_fn.set_input_shmems(X, targets)
for epoch in range(3):
    for batch in iterate_minibatch_indices(60, 20, shuffle=epoch > 0):
        train_fn(batch=batch)
        synk.all_reduce([w])
parallel = val_fn(batch=slice(0, 60))
synk.close()

serial_train_fn = theano.function([x, y], loss, updates=updates)
serial_val_fn = theano.function([x, y], [loss, accuracy])
trained = w.get_value()
w.set_value(np.zeros((4, 3), "float32"))
for epoch in range(3):
    for batch in iterate_minibatch_indices(60, 20, shuffle=epoch > 0):
        serial_train_fn(X[batch], targets[batch])
assert np.allclose(trained, w.get_value(), atol=1e-6)
assert np.allclose(parallel, serial_val_fn(X, targets), atol=1e-6)
