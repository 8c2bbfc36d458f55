"""The messages that the progress processes of several machines exchange while a program runs.

``relay`` is the work of a progress process, which runs the parts; ``part`` is their base class.
``mirrors`` copy numbers and reports of each machine's ranks to all machines. ``messages`` and
``questions`` are passed on to their receivers and to the controller, and ``remote_stripes`` are the
stripes of a center for ranks of other machines.
"""
