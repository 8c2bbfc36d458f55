"""Print whether Theano can use cuDNN. The argument is the device."""

import sys

import synkhronos as synk

synk.fork(devices=sys.argv[1:])
from theano.gpuarray import dnn

print("dnn:", dnn.dnn_available(None), dnn.dnn_available.msg)
