"""The parts of `synkhronos.extensions.loading`.

``sources`` read rows, and ``transforms`` change them with the random numbers of ``draws``. A ``reader``
calls both and checks what they return; it seeds other random ``generators`` that they use. What they use
is ``reachable`` from them. A ``plan`` says which rows are in which batch, for which rank, and which
process loads them. Batches are passed on in a ``ring`` of slots in shared memory: a ``producer`` fills
them, in a process of the loader, and a ``consumer`` takes them, in the script or, for the ``shards`` of
a program, in each rank.
"""
