"""What the couriers of several machines exchange while a program runs.

``relay`` is the work of a courier, and sends between the parts. ``post`` is how the parts send.
``mirrors`` keep numbers and reports of each machine's ranks the same on all machines. ``boxes`` pass on
messages, ``questions`` those to the controller with its answers, and ``visitors`` visit the stripes of
a center for ranks of other machines.

May import: what ``programs`` may.
"""
