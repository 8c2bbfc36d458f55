"""Run a script of the MNIST demo in float64; print the accuracy and the losses of each epoch as JSON.

The arguments are the demo's folder, the script's name, and the script's arguments.
"""

import importlib
import json
import sys

import numpy as np

folder, name, *arguments = sys.argv[1:]
sys.path.insert(0, folder)
import mnist
import network

# In float32, rounding errors in the last digit become visible within an epoch, even with one process.
network.theano.config.floatX = "float64"
digits = mnist.load_digits("sklearn")
# In a blank area, all pixels of a pooling window are equal up to rounding, so the gradient may go to all
# of them or to only one. A little noise makes the maximum unique.
for images, _ in digits.parts.values():
    images += 0.01 * np.random.RandomState(11).rand(*images.shape)
mnist.load_digits = lambda data: digits
history, accuracy = importlib.import_module(name).main(arguments)
print(json.dumps([accuracy, [epoch[:4] for epoch in history]]))
