"""Print whether Theano uses cuDNN 9, on a machine where compiling with it would succeed."""

import synkhronos as synk
import theano
from theano.gpuarray import dnn

theano.config.dnn.enabled = "auto"
dnn.dnn_present.avail, dnn.version.v = True, 90100
synk.fork(devices=["cuda0"])
print(dnn.dnn_available(None), dnn.dnn_available.msg)
