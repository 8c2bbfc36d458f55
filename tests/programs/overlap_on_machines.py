"""Training steps on two machines with two ranks each, whose gradients travel while the ranks compute."""

import numpy as np
import synkhronos as synk
from compilers import Apply, Op, compiler, cross_entropy, softmax, tt
from synkhronos.extensions import train, updates
from synkhronos.world.world import current_world

WIDTH, ROWS = 400, 13
RNG = np.random.RandomState(0)
X, Y = RNG.randn(ROWS, WIDTH).astype("float32"), RNG.randint(0, 5, ROWS).astype("int32")
BAD = 1000.0


class Late(Op):
    """The identity; its gradient fails on a rank with a bad row, after the other gradients were sent."""

    __props__ = ()

    def make_node(self, w, x):
        return Apply(self, [w, x], [w.type()])

    def perform(self, node, inputs, outputs):
        if type(self) is LateGradient and (inputs[1] == BAD).any():
            raise LookupError("a bad row")
        outputs[0][0] = inputs[0].copy()

    def infer_shape(self, node, shapes):
        return shapes[:1]

    def grad(self, inputs, gradients):
        return [LateGradient()(gradients[0], inputs[1]), inputs[1].zeros_like()]


class LateGradient(Late):
    pass


def network():
    rng = np.random.RandomState(1)
    x, y, params = tt.fmatrix("x"), tt.ivector("y"), []
    out = x
    for width in (WIDTH, WIDTH, WIDTH, 5):
        params.append(compiler.shared((rng.randn(WIDTH, width) / 20).astype("float32")))
        params.append(compiler.shared(np.zeros(width, "float32")))
        w = Late()(params[0], x) if len(params) == 2 else params[-2]
        out = tt.tanh(out.dot(w) + params[-1])
    loss = cross_entropy(softmax(out), y).mean()
    return loss, params, x, y


def descend(gradients, params):
    return [(one, one - np.float32(0.1) * gradient) for one, gradient in zip(params, gradients)]


def made(rule, *args, **kwargs):
    loss, params, x, y = network()
    return train.make_train_function(loss, params, x, y, rule, *args, **kwargs), params


def values(params):
    assert synk.in_sync(params)
    return [one.get_value() for one in params]


def check_bits():
    """Steps are the same, for any number of rows, also fewer than ranks, and for any rule."""
    for rule in ((updates.nesterov_momentum, 0.1, 0.9), (descend,)):
        (ordinary, theirs), (overlapped, ours) = made(*rule), made(*rule, overlap=True)
        assert overlapped.functions[0].replica.has_collectives
        for batch, num_slices in ((None, 1), (7, 1), (2, 1), (None, 2), ([3, 3, 1, 12], 1)):
            losses = [step(X, Y, batch=batch, num_slices=num_slices) for step in (ordinary, overlapped)]
            np.testing.assert_allclose(*losses, 1e-6)
            for one, other in zip(values(theirs), values(ours)):
                (np.testing.assert_array_equal if num_slices == 1 else np.testing.assert_allclose)(
                    one, other
                )
    return overlapped, ours


def check_profile(step):
    with synk.profile() as measured:
        step(X, Y)
        step(X, Y, num_slices=2)
    for events in measured.events:
        found = [(one.category, one.name) for one in events if one.step == 0]
        assert ("wait", "finish") in found and found.count(("copy", "start")) >= 3, found
        assert "finish" not in [one.name for one in events if one.step == 1]


def check_formats():
    exact, expected = made(updates.sgd, 0.1)
    for wire in ("float16", "int8", synk.PowerSGD(4), synk.TopK(0.5)):
        step, params = made(updates.sgd, 0.1, overlap=True, wire=wire)
        losses = [float(step(X, Y)) for _ in range(8)]
        assert losses[-1] < 0.9 * losses[0], (wire, losses)
        values(params)


def check_failures(step, params):
    """A rank that fails leaves nobody waiting, and the next steps are right."""
    for rank in range(4):
        bad, before = X.copy(), values(params)
        bad[[1, 5, 8, 11][rank]] = BAD
        try:
            step(bad, Y)
        except LookupError:
            assert rank == 0
        except synk.WorkerError as error:
            assert error.rank == rank and "a bad row" in str(error), (rank, error)
        else:
            raise AssertionError("no error")
        for one, other in zip(before, values(params)):
            np.testing.assert_array_equal(one, other)
        step(X, Y)
        values(params)


def call(rank, f):
    """In a program the progress process has other work."""
    rank.send(0, np.array(rank.rank))
    for _ in range(3):
        rank.call(f, X)
    return sorted(int(rank.receive(wait=True)[1]) for _ in range(rank.size if rank.is_master else 0))


def check_functions():
    """What cannot be completed is reduced as always, with the same result."""
    x, w = tt.fmatrix("x"), compiler.shared(np.ones((WIDTH, WIDTH), "float32"))
    vector = compiler.shared(np.zeros(WIDTH * WIDTH, "float32"), "vector")
    gradient = tt.grad(tt.sqr(x.dot(w)).mean(), w)
    new = synk.ops.in_buckets(vector, [gradient], [(WIDTH, WIDTH)])
    f = synk.function([x], updates=[(vector, new, "avg")])
    found = []
    for weights, count in ((f, 1), (f, 2), (None, 1), ([7, 3, 2, 1], 1)):
        with synk.fuse():
            for _ in range(count):
                f(X)
                synk.all_reduce(vector, weights=weights)
        assert synk.in_sync(vector)
        found.append(vector.get_value())
    assert synk.spmd(call, f)[0] == [0, 1, 2, 3]
    f.as_theano(X)
    serial = vector.get_value()
    np.testing.assert_allclose(found[0], serial, 1e-3, 1e-3)
    np.testing.assert_array_equal(found[0], found[1])
    assert abs(found[2] - serial).max() > 1e-3 and abs(found[3] - serial).max() > 1e-3


def main():
    synk.fork(4, use_gpu=False, timeout=30)
    assert current_world().transport.overlap is not None
    step, params = check_bits()
    check_profile(step)
    check_failures(step, params)
    synk.spmd(lambda rank: rank.clock)  # it frees the memory
    step(X, Y)
    values(params)
    check_functions()
    check_formats()
    print("overlapped")


if __name__ == "__main__":
    main()
