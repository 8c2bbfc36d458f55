#!/bin/sh
# pyarrow 26.0.1: Tensor.from_numpy takes the bytes of a big-endian array as those of little-endian numbers.
#
# Behavior: files such as classic netCDF, FITS and MNIST's IDX have big-endian numbers, and NumPy reads them as arrays of a
# dtype such as ">i4". pyarrow.array refuses such an array with ArrowNotImplementedError, "Byte-swapped arrays not
# supported". pyarrow.Tensor.from_numpy accepts it, as the type int32, and every number has its bytes in reverse: 1 becomes
# 16777216. So does a tensor that is written by pyarrow.ipc.write_tensor and read again. No message is given.
#
# Seen with pyarrow 26.0.1 and NumPy 2.2.6 on Python 3.11.2, for [1, 2, 300] with the dtype ">i4":
#     array       ArrowNotImplementedError
#     tensor      int32 [16777216, 33554432, 738263040]
#     read again  int32 [16777216, 33554432, 738263040]
#
# Needs Python 3.10 or newer on a little-endian machine, and pip. Exits with 0 if it behaves as described, and with 1 if
# not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install --quiet pyarrow==26.0.1 numpy==2.2.6
cat > "$folder/script.py" <<'END'
import sys

import numpy as np
import pyarrow

numbers = np.array([1, 2, 300], ">i4")


def array():
    return pyarrow.array(numbers)


def tensor():
    return pyarrow.Tensor.from_numpy(numbers)


def read_again():
    sink = pyarrow.BufferOutputStream()
    pyarrow.ipc.write_tensor(tensor(), sink)
    return pyarrow.ipc.read_tensor(pyarrow.BufferReader(sink.getvalue()))


swapped = f"int32 {numbers.view('<i4').tolist()}"
changed = False
for make, expected in ((array, "ArrowNotImplementedError"), (tensor, swapped), (read_again, swapped)):
    try:
        made = make()
        got = f"{made.type} {made.to_numpy().tolist()}"
    except pyarrow.ArrowException as error:
        got = type(error).__name__
    print(f"{make.__name__.replace('_', ' '):10}  {got}")
    changed |= got != expected
print("This has changed" if changed else "As described")
sys.exit(changed)
END
"$folder/env/bin/python" "$folder/script.py"
