"""Take training steps of a network with random rows; print the losses and the seconds per step, as JSON.

The arguments are ``mnist`` or ``resnet``, the size, the number of steps, and the devices. For ``mnist``,
Lasagne's CNN, the size is the number of rows of a minibatch. For ``resnet``, ResNet-50, it is the number
of pixels of images, 8 of which are a minibatch. Rows and parameters do not depend on the ranks.
"""

import json
import sys
import time

import numpy as np
import synkhronos as synk

name, size, count, *devices = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
synk.fork(devices=devices)
import lasagne
import theano
import theano.tensor as tt
from lasagne import layers
from lasagne.nonlinearities import rectify, softmax
from synkhronos.extensions import train, updates, zoo

RATE = 0.01
theano.config.floatX = "float32"


def mnist():
    x = tt.ftensor4("x")
    layer = layers.InputLayer((None, 1, 28, 28), x)
    for _ in range(2):
        layer = layers.MaxPool2DLayer(layers.Conv2DLayer(layer, 32, 5, nonlinearity=rectify), 2)
    layer = layers.DenseLayer(layer, 256, nonlinearity=rectify)
    return layers.DenseLayer(layer, 10, nonlinearity=softmax), x, (size, 1, 28, 28)


def resnet():
    x = tt.ftensor4("x")
    # Batch normalization would make the shares of two ranks another loss.
    network, _ = zoo.resnet50(size, 10, input=x, norm=lambda layer: layer)
    return network, x, (8, 3, size, size)


lasagne.random.set_rng(np.random.RandomState(1))
network, x, shape = {"mnist": mnist, "resnet": resnet}[name]()
y = tt.ivector("y")
loss = lasagne.objectives.categorical_crossentropy(layers.get_output(network), y).mean()
params = layers.get_all_params(network, trainable=True)
if name == "resnet":  # whose sums of layers grow without the normalization
    for one in params:
        one.set_value(one.get_value() * np.float32(0.5))
step = train.make_train_function(loss, params, x, y, updates.momentum, RATE, momentum=0.9)
synk.distribute()
rng = np.random.RandomState(2)
rows = synk.data(rng.rand(*shape).astype("float32")), synk.data(rng.randint(0, 10, shape[0], "int32"))
losses, seconds = [], []
for _ in range(count):
    began = time.perf_counter()
    losses.append(float(step(*rows)))
    seconds.append(time.perf_counter() - began)
assert np.isfinite(losses).all(), losses
print(json.dumps({"losses": losses, "seconds": float(np.median(seconds[1:])), "first": seconds[0]}))
