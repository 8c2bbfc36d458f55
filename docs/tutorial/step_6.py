import time

import synkhronos as synk
from synkhronos.extensions.train import parallel_function
import numpy as np
import theano
import theano.tensor as T

EPOCHS, BATCH, UNITS, RATE = 6, 1000, 2000, 0.01

synk.fork(2, use_gpu=False)

# Points around three centers; the label is the number of the center.
random = np.random.RandomState(0)
labels = random.randint(3, size=6000)
points = random.randn(6000, 2) + np.array([[2, 0], [-1, 1.7], [-1, -1.7]])[labels]

# A network with one hidden layer.
x, y = T.matrix("x", dtype="float64"), T.lvector("y")
w = theano.shared(0.1 * random.randn(2, UNITS), "w")
v = theano.shared(np.zeros((UNITS, 3)), "v")
probabilities = T.nnet.softmax(T.dot(T.tanh(T.dot(x, w)), v))
loss = T.nnet.categorical_crossentropy(probabilities, y).mean()
accuracy = T.eq(probabilities.argmax(axis=1), y).mean()
updates = [(param, param - RATE * T.grad(loss, param)) for param in (w, v)]

train_model = parallel_function([x, y], loss, updates=updates)
evaluate = synk.function([x, y], accuracy)

x_data, y_data = synk.data(points), synk.data(labels)
validation = slice(5000, 6000)

for epoch in range(EPOCHS):
    begin = time.perf_counter()
    order = random.permutation(5000)
    losses = []
    for start in range(0, 5000, BATCH):
        rows = order[start : start + BATCH]
        losses.append(train_model(x_data, y_data, batch=rows))
    seconds = time.perf_counter() - begin
    correct = evaluate(x_data, y_data, batch=validation, num_slices=2)
    print(f"epoch {epoch}: loss {np.mean(losses):.4f}, accuracy {correct:.3f}, {seconds:.2f} s")
