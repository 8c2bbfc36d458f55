"""Print the sum of the elements of a matrix squared, computed by Theano.

With the argument ``scipy``, use the OpenBLAS in SciPy's wheel.
"""

import os
import runpy
import sys
from pathlib import Path

if sys.argv[1:] == ["scipy"]:
    (found,) = [Path(one, "synkhronos") for one in sys.path if Path(one, "synkhronos").is_dir()]
    environment = runpy.run_path(str(found / "host" / "environment.py"))
    ldflags = environment["ldflags_by_path"](environment["scipy_openblas"]())
    os.environ["THEANO_FLAGS"] = f'blas.ldflags="{ldflags}"'
    runpy.run_path(str(found / "host" / "imports.py"))["provide"]()
else:
    import synkhronos  # noqa: F401
import theano
import theano.tensor as tt

x = tt.dmatrix()
images = x.dimshuffle("x", "x", 0, 1)
f = theano.function([x], tt.nnet.conv2d(images, images[:, :, :1, :1]).sum() + tt.dot(x, x).sum())
if sys.argv[1:] == ["scipy"]:
    assert "scipy.libs" in theano.config.blas.ldflags
    assert "openblas" in Path("/proc/self/maps").read_text()
print(float(f([[1.0, 2.0], [3.0, 4.0]])))
