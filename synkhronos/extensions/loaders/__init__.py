"""The parts of `synkhronos.extensions.loading`.

``sources`` read rows, and ``transforms`` change them with random numbers. What both use is ``reachable``
from them, such as other random generators. Batches are passed on in a ``ring`` of slots in shared
memory: a ``producer`` fills them, in a process of the loader, and a `Consumer` takes them, in the script
or in each rank. `BatchPlan` in ``arithmetic/minibatches`` says which rows are in which batch.
"""
