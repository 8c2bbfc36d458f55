"""Run a script of the MNIST demo in float64; print the accuracy and the losses of each epoch as JSON.

Arguments: the demo's folder, the script's name, its arguments.
"""

import importlib
import json
import sys

import numpy as np

folder, name, *arguments = sys.argv[1:]
sys.path.insert(0, folder)
import mnist
import network

# In float32 the last digit's rounding is visible within an epoch, however many processes.
network.theano.config.floatX = "float64"
digits = mnist.load_digits("sklearn")
# On plain paper all pixels of a pooling window are equal, up to rounding, and the gradient goes to all
# of them or to one. A little noise makes it a smooth function again.
for images, _ in digits.parts.values():
    images += 0.01 * np.random.RandomState(11).rand(*images.shape)
mnist.load_digits = lambda data: digits
history, accuracy = importlib.import_module(name).main(arguments)
print(json.dumps([accuracy, [epoch[:4] for epoch in history]]))
