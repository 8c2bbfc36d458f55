#!/bin/sh
# safetensors 0.8.0: save_file of safetensors.numpy saves other numbers than those of an array that is not contiguous.
#
# Behavior: for NumPy arrays, the bytes that are written are those that follow the array's first element in memory, in the
# number that the shape asks for. A transposed matrix is saved with its new shape and the old order, so the loaded one has
# its numbers in other places; of every second element of a vector the first half of the vector is saved. Dtype, shape
# and size are right, and no message is given. np.save and np.savez save the numbers of the array. The remedy is
# np.ascontiguousarray.
#
# Seen with safetensors 0.8.0 and NumPy 2.2.6 on Python 3.11.2:
#     transposed      saved [[0, 3], [1, 4], [2, 5]]    loaded [[0, 1], [2, 3], [4, 5]]
#     every second    saved [0, 2, 4]                   loaded [0, 1, 2]
#     contiguous      saved [[0, 1, 2], [3, 4, 5]]      loaded [[0, 1, 2], [3, 4, 5]]
#
# Needs Python 3.10 or newer, and pip. Exits with 0 if it behaves as described, and with 1 if not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install --quiet safetensors==0.8.0 numpy==2.2.6
cat > "$folder/script.py" <<'END'
import sys

import numpy as np
from safetensors.numpy import load_file, save_file

path = sys.argv[1]
numbers = np.arange(6)
cases = {
    "transposed": (numbers.reshape(2, 3).T, [[0, 1], [2, 3], [4, 5]]),
    "every second": (numbers[::2], [0, 1, 2]),
    "contiguous": (numbers.reshape(2, 3), [[0, 1, 2], [3, 4, 5]]),
}
changed = False
for name, (array, expected) in cases.items():
    save_file({"array": array}, path)
    loaded = load_file(path)["array"].tolist()
    print(f"{name:12}    saved {str(array.tolist()):26}    loaded {loaded}")
    changed |= loaded != expected
print("This has changed" if changed else "As described")
sys.exit(changed)
END
"$folder/env/bin/python" "$folder/script.py" "$folder/file.safetensors"
