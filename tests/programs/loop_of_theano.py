"""Runs a loop of Theano, whose C code it compiles; prints whether it did, without the library."""

import sys

import theano
import theano.tensor as tt

x = tt.dvector()
total, _ = theano.scan(lambda one, state: one + state, x, tt.zeros(()))
print(theano.function([x], total, mode=theano.Mode("cvm", "fast_compile"))([1, 2, 3]))
print(type(sys.modules["theano.scan_module.scan_perform_ext"].perform).__name__)
print("synkhronos" in sys.modules)
