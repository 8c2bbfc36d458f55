"""The path of somebody with a script: it runs unchanged, then in parallel, with a mistake in between."""

from steps import changed, follow

#: As one would write it with plain Theano.
SERIAL = """
import numpy as np
import theano
import theano.tensor as T

random = np.random.RandomState(0)
rows = random.normal(size=(600, 4))
labels = (rows.dot([1, -2, 0.5, 0]) > 0).astype("int32")
x, y = T.dmatrix("x"), T.ivector("y")
w, b = theano.shared(np.zeros((4, 2)), "w"), theano.shared(np.zeros(2), "b")
probabilities = T.nnet.softmax(T.dot(x, w) + b)
loss = T.nnet.categorical_crossentropy(probabilities, y).mean()
updates = [(p, p - 0.5 * T.grad(loss, p)) for p in (w, b)]
train = theano.function([x, y], loss, updates=updates)
predict = theano.function([x], probabilities[:, 1])

for epoch in range(3):
    losses = [float(train(rows[i : i + 60], labels[i : i + 60])) for i in range(0, 600, 60)]
    print(f"epoch {epoch}: loss {np.mean(losses):.9f}")
correct = (predict(rows[:50]) > 0.5) == labels[:50]
print(int(np.sum(correct)), "of 50 are correct")
"""

#: As docs/porting.rst says, but for the output that has an item for each row.
MISTAKEN = changed(
    SERIAL,
    (
        "import numpy as np\n",
        "import synkhronos as synk\nimport synkhronos.extensions.train\nimport numpy as np\n",
    ),
    ("import theano.tensor as T\n", "import theano.tensor as T\n\nsynk.fork(2, use_gpu=False)\n"),
    ("train = theano.function", "train = synk.extensions.train.parallel_function"),
    ("predict = theano.function", "predict = synk.function"),
)
PARALLEL = changed(MISTAKEN, ("probabilities[:, 1])", '(probabilities[:, 1], "gather"))'))


def path(newcomer):
    newcomer.install(("README.rst", "apt-get install g++"), ("README.rst", "python3 -m venv env"))
    (newcomer.folder / "mine.py").write_text(SERIAL)
    serial, _ = newcomer.run("-m", "synkhronos", "run", "mine.py")
    losses = serial.splitlines()[:3]
    assert losses[0].startswith("epoch 0: loss 0."), serial

    # The mistake is reported before it does harm, with the remedy.
    code = MISTAKEN.replace(
        "correct = ", "print(predict(rows[:50]).shape)\nraise SystemExit\ncorrect = "
    )
    printed, complaints = newcomer.run_script("mistaken.py", code)
    assert printed.splitlines()[:3] == losses, printed
    assert "SynkhronosWarning" in complaints and "gather" in complaints, complaints

    printed, complaints = newcomer.run_script("parallel.py", PARALLEL)
    assert printed == serial, printed
    assert "Warning" not in complaints, complaints


if __name__ == "__main__":
    follow(path, __doc__)
