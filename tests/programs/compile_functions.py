"""Compile functions, and print what they return. The arguments are the compile folder, and how."""

import os
import sys

folder, how = sys.argv[1:]
os.environ["THEANO_FLAGS"] += f",base_compiledir={folder}"

import theano
import theano.tensor as tt

import synkhronos  # noqa: F401
from synkhronos.engines.theano import module_cache as headers

if how == "plain":
    theano.gof.cmodule.output_subprocess_Popen = headers.of_theano
if how == "broken":
    headers._FURTHER = "#error\n"
x = tt.vector("x")
for number, expression in enumerate([x + 1, tt.exp(x), tt.sqr(x) * 3, tt.tanh(x) - x]):
    print(theano.function([x], expression, mode="FAST_RUN")([number]))
