"""Operations in C++ that compute what Theano's own do on the CPU, in less time.

Theano builds graphs of its own operations, and differentiates them. When a function is compiled, the
optimizations that ``registration`` registers replace some of them by those of this folder, in every
function of this process. The classes are derived from Theano's where these have a counterpart, so
shapes, gradients and whatever asks for the kind of an operation are Theano's.

``convolution`` and ``pooling`` are those of images. ``loops`` computes elementwise results and their
sums in one pass over memory, and ``fusion`` finds what to join in a loop; ``inplace`` lets loops
overwrite their inputs. ``batch_normalization`` and ``moments`` write formulas so that fewer passes are
needed. ``optimizations`` has what these modules share.

The C++ code is in the files ``*.h``, which ``cpp`` reads; their content is part of the key under which
Theano keeps a compiled module. ``cpp`` also says how operations are named there.

May import: what ``engines`` may.
"""
