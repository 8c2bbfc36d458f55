"""``python -m synkhronos doctor``: reports what is missing on this machine, and how to fix it.

``check`` has the record of a check, and the subprocess in which a check runs code. ``checks`` is the
table of all checks, with those of the software and of the machine; ``gpus`` has those of GPUs, and
``blas_kernels`` tells whether OpenBLAS uses the instructions of the processor.
"""
