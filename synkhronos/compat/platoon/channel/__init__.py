"""The two ends of a connection: ``controller`` has `Controller`, and ``worker`` has `Worker`.

`Lieutenant` and `Soldier` are their former names, with the former arguments.
"""

from synkhronos.compat.platoon.channel.controller import Controller, Lieutenant
from synkhronos.compat.platoon.channel.worker import Soldier, Worker

__all__ = ["Controller", "Lieutenant", "Soldier", "Worker"]
