"""Import everything that the library imports, including the doctor's checks, and create a world."""

import synkhronos as synk
import theano.tensor as tt
from synkhronos.host.doctor import checks

synk.get_n_gpu()
for check in checks.CHECKS:
    check.run()
synk.fork(2, use_gpu=False)
x = tt.vector()
assert synk.function([x], (x.sum(), "sum"))([1, 2]) == 3
synk.close()
