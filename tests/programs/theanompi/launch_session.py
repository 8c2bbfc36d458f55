"""A launch script as in the README of Theano-MPI, for the rule that the first argument names."""

import sys

from theanompi import BSP, EASGD, GOSGD

rule = {"BSP": BSP, "EASGD": EASGD, "GOSGD": GOSGD}[sys.argv[1]]()
# modelfile: the relative path to the model file
# modelclass: the class name of the model to be imported from that file
rule.init(devices=["cpu", "cpu"], modelfile="models.modelfile", modelclass="ModelClass")
rule.wait()
