#!/bin/sh
# PyTensor 3.3.8: arccosh(cosh(x)) is x, and not the absolute value of x.
#
# Behavior: PyTensor replaces a function of its inverse by the argument, in every mode, also where that is not the same
# number. arccosh(cosh(-2)) is -2, while it is 2 in mathematics and in NumPy. cosh(arccosh(-2)) and tanh(arctanh(2)),
# which are NaN in NumPy, are -2 and 2. No message is given. As all modes do this, comparing two modes does not reveal
# it; a mode without rewrites gives NumPy's numbers. arcsin(sin(x)) and sqrt(x ** 2) are not replaced by x.
#
# Seen with PyTensor 3.3.8, Numba 0.68.0, NumPy 2.5.5 and SciPy 1.18.1 on Python 3.13.0:
#     arccosh(cosh(-2))    default -2.0    FAST_COMPILE -2.0    without rewrites 2.0    NumPy 2.0
#     cosh(arccosh(-2))    default -2.0    FAST_COMPILE -2.0    without rewrites nan    NumPy nan
#     tanh(arctanh(2))     default 2.0     FAST_COMPILE 2.0     without rewrites nan    NumPy nan
#
# Needs Python 3.12 or newer, and pip. Exits with 0 if it behaves as described, and with 1 if not.
set -eu
for python in python3.13 python3.12 python3 ~/.pyenv/versions/3.1[23]*/bin/python3; do
    "$python" -c "import sys; sys.exit(sys.version_info < (3, 12))" 2>/dev/null && break
done
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/env"
"$folder/env/bin/python" -m pip install --quiet pytensor==3.3.8 numba==0.68.0 numpy==2.5.5 scipy==1.18.1
export PYTENSOR_FLAGS="base_compiledir=$folder/compiled"
cat > "$folder/script.py" <<'END'
import sys

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.mode import Mode

np.seterr(all="ignore")
modes = {"default": None, "FAST_COMPILE": "FAST_COMPILE", "without rewrites": Mode("py", None)}
cases = {
    "arccosh(cosh(-2))": (lambda one, x: one.arccosh(one.cosh(x)), -2.0),
    "cosh(arccosh(-2))": (lambda one, x: one.cosh(one.arccosh(x)), -2.0),
    "tanh(arctanh(2))": (lambda one, x: one.tanh(one.arctanh(x)), 2.0),
}
changed = False
for name, (compute, value) in cases.items():
    x = pt.dscalar("x")
    got = {key: float(pytensor.function([x], compute(pt, x), mode=mode)(value)) for key, mode in modes.items()}
    got["NumPy"] = round(float(compute(np, value)), 12)
    print(f"{name:20}", "   ".join(f"{key} {number}" for key, number in got.items()))
    changed |= got["default"] != value or got["FAST_COMPILE"] != value
    changed |= not np.allclose(got["without rewrites"], got["NumPy"], equal_nan=True)
    changed |= got["NumPy"] == value
print("This has changed" if changed else "As described")
sys.exit(changed)
END
"$folder/env/bin/python" "$folder/script.py"
