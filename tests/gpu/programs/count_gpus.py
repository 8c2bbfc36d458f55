"""Create a world on all three GPUs; print the type of its communicator, and the master's devices."""

import synkhronos as synk

assert synk.get_n_gpu() == 3
assert synk.fork() == 3
import theano.gpuarray

print(type(synk.world.world.current_world().rank_state.comm).__name__, *theano.gpuarray.init_dev.devmap)
