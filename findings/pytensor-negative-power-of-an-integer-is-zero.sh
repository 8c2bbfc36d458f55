#!/bin/sh
# PyTensor 3.3.8: a negative power of an integer variable is 0 with the default compiler.
#
# Behavior: the result of an integer to the power of an integer has the type of an integer. If the exponent is negative,
# functions of the default compiler (Numba) return 0 without a message, or 1 and -1 for the bases 1 and -1, also for the
# constant exponent of x ** -1. So 2 ** -epoch, a learning rate or a step size that is halved, is 0. In the mode
# FAST_COMPILE the same graph is a ValueError, as in NumPy. Division, 1 / x, is right in both, and so is 2.0 ** -epoch.
#
# Seen with PyTensor 3.3.8, Numba 0.68.0, NumPy 2.5.5 and SciPy 1.18.1 on Python 3.13.0:
#     2 ** -epoch for epoch = 2         default 0       FAST_COMPILE ValueError
#     x ** -1 for x = 2                 default 0       FAST_COMPILE ValueError
#     2.0 ** -epoch for epoch = 2       default 0.25    FAST_COMPILE 0.25
#     1 / x for x = 2                   default 0.5     FAST_COMPILE 0.5
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

import pytensor
import pytensor.tensor as pt

number = pt.iscalar("number")
cases = {
    "2 ** -epoch for epoch = 2": (2**-number, 0, "ValueError"),
    "x ** -1 for x = 2": (number**-1, 0, "ValueError"),
    "2.0 ** -epoch for epoch = 2": (2.0**-number, 0.25, 0.25),
    "1 / x for x = 2": (1 / number, 0.5, 0.5),
}


def compute(graph, mode):
    try:
        return pytensor.function([number], graph, mode=mode)(2).item()
    except ValueError:
        return "ValueError"


changed = False
for name, (graph, *expected) in cases.items():
    got = [compute(graph, mode) for mode in (None, "FAST_COMPILE")]
    print(f"{name:30} default {got[0]:<8} FAST_COMPILE {got[1]}")
    changed |= got != expected
print("This has changed" if changed else "As described")
sys.exit(changed)
END
"$folder/env/bin/python" "$folder/script.py"
