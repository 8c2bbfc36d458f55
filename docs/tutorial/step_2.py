import synkhronos as synk
from synkhronos.extensions.train import parallel_function
import numpy as np
import theano
import theano.tensor as T

EPOCHS, BATCH = 6, 100

synk.fork(2, use_gpu=False)

# Points around three centers; the label is the number of the center.
random = np.random.RandomState(0)
labels = random.randint(3, size=6000)
points = random.randn(6000, 2) + np.array([[2, 0], [-1, 1.7], [-1, -1.7]])[labels]

# A network with one hidden layer.
x, y = T.matrix("x", dtype="float64"), T.lvector("y")
w = theano.shared(0.1 * random.randn(2, 20), "w")
v = theano.shared(np.zeros((20, 3)), "v")
probabilities = T.nnet.softmax(T.dot(T.tanh(T.dot(x, w)), v))
loss = T.nnet.categorical_crossentropy(probabilities, y).mean()
accuracy = T.eq(probabilities.argmax(axis=1), y).mean()
updates = [(param, param - 0.5 * T.grad(loss, param)) for param in (w, v)]

train_model = parallel_function([x, y], loss, updates=updates)
evaluate = synk.function([x, y], accuracy)

for epoch in range(EPOCHS):
    order = random.permutation(5000)  # the last 1000 points are for validation
    losses = []
    for start in range(0, 5000, BATCH):
        rows = order[start : start + BATCH]
        losses.append(train_model(points[rows], labels[rows]))
    correct = evaluate(points[5000:], labels[5000:])
    print(f"epoch {epoch}: loss {np.mean(losses):.4f}, accuracy {correct:.3f}")
