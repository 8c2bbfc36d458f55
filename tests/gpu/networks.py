"""Comparison of convolutions, pooling and batch normalization over ranks with a serial function.

Call ``main(kind, *devices)``, where `kind` is "cudnn" or "no cudnn". Any device may be used. The serial
results are computed on the CPU.
"""

import numpy as np
import synkhronos as synk

ROWS = 5


def layers(tt, pool, bn, x, weights, gamma, beta):
    """Return the output of each layer, where the input of each is the output of the previous one."""
    convolved = tt.nnet.conv2d(x, weights, border_mode="half", subsample=(1, 1))
    maxed = pool.pool_2d(convolved, (2, 2), ignore_border=True)
    averaged = pool.pool_2d(maxed, (2, 2), ignore_border=True, mode="average_exc_pad")
    return (
        convolved,
        maxed,
        averaged,
        bn.batch_normalization_test(averaged, gamma, beta, beta + 0.5, gamma + 0.25, axes="spatial"),
    )


def main(kind, *devices):
    """Compare outputs and gradients with a serial function, and whether cuDNN is used as it should."""
    dnn = kind == "cudnn"
    synk.fork(devices=list(devices))
    import theano
    import theano.tensor as tt
    from theano.tensor.nnet import bn
    from theano.tensor.signal import pool

    if not dnn:
        theano.config.dnn.enabled = "False"
    rng = np.random.default_rng(0)
    x = tt.ftensor4("x")
    one_a_channel = (True, False, True, True)
    params = [
        theano.shared(rng.normal(size=(4, 3, 3, 3)).astype("float32")),
        theano.shared(rng.uniform(1, 2, (1, 4, 1, 1)).astype("float32"), broadcastable=one_a_channel),
        theano.shared(rng.normal(size=(1, 4, 1, 1)).astype("float32"), broadcastable=one_a_channel),
    ]
    images = rng.normal(size=(ROWS, 3, 8, 8)).astype("float32")
    outputs = layers(tt, pool, bn, x, *params)
    trained = bn.batch_normalization_train(outputs[1], *params[1:], axes="spatial")[0]
    loss = tt.sqr(outputs[-1]).sum(axis=(1, 2, 3)).mean() + 0.1 * tt.sqr(outputs[2]).sum()
    gradients = tt.grad(loss, params)
    modes = [*["gather"] * len(outputs), "avg", "gather"]
    collected = [*outputs, tt.sqr(outputs[-1]).sum(axis=(1, 2, 3)).mean(), trained]
    f = synk.function([x], [*zip(collected, modes), *((one, "sum") for one in gradients)])
    on_cpu = theano.compile.get_default_mode().excluding("gpuarray")
    serial = theano.function([x], [*collected, *(one.transfer("cpu") for one in gradients)], mode=on_cpu)
    n = len(devices)
    for num_slices in (1, 2):
        got = f(images, num_slices=num_slices)
        steps = [
            part
            for own in np.array_split(images, n)
            for part in np.array_split(own, num_slices)
            if len(part)
        ]
        by_step = [serial(part) for part in steps]
        for position in range(len(collected) + len(gradients)):
            values = [results[position] for results in by_step]
            if position >= len(collected):
                expected = sum(values)
            elif np.ndim(values[0]):
                expected = np.concatenate(values)
            else:
                expected = np.average(values, weights=[len(part) for part in steps])
            np.testing.assert_allclose(got[position], expected, rtol=2e-3, atol=2e-4)
    kinds = {type(node.op).__name__ for node in f.replica.compiled.maker.fgraph.apply_nodes}
    assert any("Dnn" in kind for kind in kinds) == dnn, kinds
    assert dnn or {"GpuCorrMM", "GpuPool"} <= kinds, kinds
    print("conv, pooling and batch norm on", devices, "equal the serial ones; used", sorted(kinds))
