"""Print whether the dynamic loader finds NVIDIA's driver."""

from synkhronos.host.nvidia import driver_is_visible

print(driver_is_visible())
