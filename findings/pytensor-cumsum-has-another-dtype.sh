#!/bin/sh
# PyTensor 3.3.8: the cumulative sum of small integers has another dtype than its variable, or wraps around.
#
# Behavior: the variable pt.cumsum(x) has the dtype of x, here int8. The array that a function returns for it depends on
# the number of dimensions and on the mode: for a vector it is int64, with the exact sums; for a matrix along an axis the
# default compiler (Numba) returns int8, whose sums have wrapped around, and the mode FAST_COMPILE returns int64. An
# update stores the int64 array in a shared variable of type int8, which has this dtype from then on. A vector and a
# matrix of one row thus have different sums. No message is given.
#
# Seen with PyTensor 3.3.8, Numba 0.68.0, NumPy 2.5.5 and SciPy 1.18.1 on Python 3.13.0, for 100, 100, 100:
#     vector              int8 variable    default [100, 200, 300] int64    FAST_COMPILE [100, 200, 300] int64
#     matrix, axis 1      int8 variable    default [100, -56, 44] int8      FAST_COMPILE [100, 200, 300] int64
#     shared variable     int8 variable    default [100, 200, 300] int64    FAST_COMPILE [100, 200, 300] int64
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

numbers = np.full(3, 100, "int8")
exact, wrapped = ([100, 200, 300], "int64"), ([100, -56, 44], "int8")


def of_vector(mode):
    x = pt.bvector()
    graph = pt.cumsum(x)
    return graph, pytensor.function([x], graph, mode=mode)(numbers)


def of_matrix(mode):
    x = pt.bmatrix()
    graph = pt.cumsum(x, axis=1)
    return graph, pytensor.function([x], graph, mode=mode)(numbers[None])[0]


def of_update(mode):
    x, shared = pt.bvector(), pytensor.shared(np.zeros(3, "int8"))
    pytensor.function([x], updates=[(shared, pt.cumsum(x))], mode=mode)(numbers)
    return shared, shared.get_value()


changed = False
cases = {
    "vector": (of_vector, exact, exact),
    "matrix, axis 1": (of_matrix, wrapped, exact),
    "shared variable": (of_update, exact, exact),
}
for name, (compute, *expected) in cases.items():
    got = []
    for mode in (None, "FAST_COMPILE"):
        variable, array = compute(mode)
        changed |= variable.dtype != "int8"
        got.append((array.tolist(), str(array.dtype)))
    print(f"{name:18} {variable.dtype} variable    default {got[0]}    FAST_COMPILE {got[1]}")
    changed |= got != expected
print("This has changed" if changed else "As described")
sys.exit(changed)
END
"$folder/env/bin/python" "$folder/script.py"
