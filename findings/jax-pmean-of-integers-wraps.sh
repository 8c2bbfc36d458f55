#!/bin/sh
# JAX 0.12.0.1: the mean over devices of small integers, by jax.lax.pmean, wraps around.
#
# Behavior: pmean adds in the dtype of its argument and divides afterwards. Its result of integers is float32, like
# that of jnp.mean, but the sum has wrapped by then: the mean of 200 and 200 in uint8 is 72, of 100 and 100 in int8
# is -28, and of 2**30 and 2**30 in int32 is negative. In float16 the mean of 60000 and 60000 is inf. jnp.mean of the
# same two numbers is right in each case. pmap, vmap with an axis name, and shard_map agree. There is no warning. The
# documentation of pmean has integers in its example, and says nothing of the dtype in which it adds.
#
# Seen with jax and jaxlib 0.12.0.1 and numpy 2.5.5 on Python 3.13.0, on a CPU that is divided into two devices:
#     uint8    mean 200.0         pmean 72.0
#     int8     mean 100.0         pmean -28.0
#     int32    mean 1073741824.0  pmean -1073741824.0
#     float16  mean 60000.0       pmean inf
#
# Needs Python 3.12 or newer, and pip. Exits with 0 if it behaves as described, and with 1 if not.
set -eu
for python in python3.13 python3.12 python3 ~/.pyenv/versions/3.1[23]*/bin/python3; do
    "$python" -c "import sys; sys.exit(sys.version_info < (3, 12))" 2>/dev/null && break
done
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/env"
"$folder/env/bin/python" -m pip install --quiet jax==0.12.0.1 jaxlib==0.12.0.1 numpy==2.5.5
cat > "$folder/pmean.py" <<'END'
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

seen = {
    "uint8": (200, 72.0),
    "int8": (100, -28.0),
    "int32": (2**30, -(2.0**30)),
    "float16": (60000, np.inf),
}
mesh = Mesh(np.array(jax.devices()), ("device",))


def pmean(number):
    return jax.lax.pmean(number, "device")


ways = {
    "pmap": jax.pmap(pmean, axis_name="device"),
    "vmap": jax.vmap(pmean, axis_name="device"),
    "shard_map": jax.shard_map(
        pmean, mesh=mesh, in_specs=PartitionSpec("device"), out_specs=PartitionSpec()
    ),
}
changed = False
for dtype, (number, expected) in seen.items():
    both = np.array([number, number], dtype)
    mean = float(jnp.mean(jnp.asarray(both)))
    got = {name: float(np.ravel(way(both))[0]) for name, way in ways.items()}
    print(f"{dtype:8} mean {mean:<14} pmean {got['pmap']}")
    changed |= mean != number or any(value != expected for value in got.values())
print("This has changed" if changed else "As described")
sys.exit(changed)
END
"$folder/env/bin/python" "$folder/pmean.py"
