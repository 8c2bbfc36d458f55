"""Faster operations in C++ in place of Theano's own operations for the CPU.

Theano builds graphs of its own operations, and differentiates them. When a function is compiled, the
optimizations that ``registration`` registers replace some of them by operations of this folder, in every
function of this process. The classes are derived from Theano's where these have a counterpart, so shapes
and gradients are Theano's, and code that checks the class of an operation recognizes them.

``images`` has convolutions and pooling. ``loops`` computes elementwise results and their sums in one
pass over memory; it finds what to join in a loop, and lets loops overwrite their inputs.
``normalization`` writes formulas so that fewer passes are needed.

The C++ code is in the files ``*.h``, which ``cpp`` reads; their content is part of the key under which
Theano keeps a compiled module. ``cpp`` also says how operations are named there, and has the common
code of the optimizations.
"""
