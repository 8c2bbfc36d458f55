#!/bin/sh
# PyTensor 3.3.8 with the mode JAX: a sum is computed in the dtype of its argument, not in the one that was asked for.
#
# Behavior: x.sum(dtype=...) and x.sum(acc_dtype=...) state in which dtype a sum is accumulated, and PyTensor takes float64
# for float32 by default, and float32 for float16. The modes FAST_COMPILE and Numba do so. The mode JAX adds in the dtype
# of the argument and converts the finished sum: float16 overflows above 65504, also in a mean, whose value is then
# infinite; float32 loses terms below a half of the last digit. The result has the dtype that was asked for, so it looks
# like a sum of that precision. No message is given.
#
# Seen with PyTensor 3.3.8, JAX 0.10.2, Numba 0.68.0, NumPy 2.5.5 and SciPy 1.18.1 on Python 3.13.0:
#     sum of 70000 float16 ones in float32      FAST_COMPILE 70000.0         JAX inf
#     mean of 70000 float16 ones                FAST_COMPILE 1.0             JAX inf
#     sum of float32 2**24, 1, 1 in float64     FAST_COMPILE 16777218.0      JAX 16777216.0
#
# Needs Python 3.12 or newer, and pip. Exits with 0 if it behaves as described, and with 1 if not.
set -eu
for python in python3.13 python3.12 python3 ~/.pyenv/versions/3.1[23]*/bin/python3; do
    "$python" -c "import sys; sys.exit(sys.version_info < (3, 12))" 2>/dev/null && break
done
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/env"
"$folder/env/bin/python" -m pip install --quiet pytensor==3.3.8 jax==0.10.2 numba==0.68.0 numpy==2.5.5 scipy==1.18.1
export PYTENSOR_FLAGS="base_compiledir=$folder/compiled" JAX_PLATFORMS=cpu JAX_ENABLE_X64=1
cat > "$folder/script.py" <<'END'
import sys

import numpy as np
import pytensor
import pytensor.tensor as pt

half, single = pt.vector(dtype="float16"), pt.vector(dtype="float32")
ones, large = np.ones(70000, "float16"), np.array([2**24, 1, 1], "float32")
cases = {
    "sum of 70000 float16 ones in float32": (half, half.sum(dtype="float32"), ones, 70000, np.inf),
    "mean of 70000 float16 ones": (half, half.mean(), ones, 1, np.inf),
    "sum of float32 2**24, 1, 1 in float64": (single, single.sum(dtype="float64"), large, 2**24 + 2, 2**24),
}
changed = False
for name, (x, graph, numbers, *expected) in cases.items():
    modes = "FAST_COMPILE", "JAX"
    got = [float(pytensor.function([x], graph, mode=mode)(numbers)) for mode in modes]
    print(f"{name:40}  FAST_COMPILE {got[0]:<14}  JAX {got[1]}")
    changed |= got != expected
print("This has changed" if changed else "As described")
sys.exit(changed)
END
"$folder/env/bin/python" "$folder/script.py"
