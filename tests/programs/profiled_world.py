"""Create a world whose workers are profiled."""

import synkhronos as synk
import theano.tensor as tt

synk.fork(2, use_gpu=False, profile_workers=True)
x = tt.dvector()
f = synk.function([x], (x.sum(), "sum"))
print(f([1.0, 2.0, 3.0]))
synk.close()
