"""Training rules: ranks train at their own pace, and a rule determines what they exchange and when.

:func:`train` is the loop that most scripts need. Rules can also be used in your own programs: each rank
calls ``rule.start(rank, params)``, after each of its steps ``rule.after_step(rank, params, number)``,
and ``rule.finish(rank, params)`` at the end. A rule of your own is a class derived from :class:`Rule`.

========================  ===========================================================  ============
rule                      what is exchanged                                            collectives
========================  ===========================================================  ============
:class:`BSP`              gradients or parameters are averaged, every `period` steps   yes
:class:`LocalSGD`         parameters are averaged, every `period` steps                yes
:class:`DiLoCo`           as `LocalSGD`, then an outer step with Nesterov momentum     yes
:class:`EASGD`            each rank and the center pull at each other                  no
:class:`Downpour`         each rank adds its changes to the center, and fetches it     no
:class:`ASGD`             `Downpour` after every step                                  no
:class:`SSP`              `ASGD`, but no rank gets far ahead of the slowest            no
:class:`GoSGD`            each rank sends its parameters to another, at random         no
========================  ===========================================================  ============

The modules: ``rule`` is the base class, with steps in two parts; ``averaging`` and ``asynchronous`` have
the rules. ``training`` is the loop, the script's side and the side of each rank, also in sessions.
``record`` has what a rank records, the record, its writers, and the state for a checkpoint.
"""

from synkhronos.extensions.rules.asynchronous import ASGD, EASGD, SSP, Downpour, GoSGD
from synkhronos.extensions.rules.averaging import BSP, DiLoCo, LocalSGD
from synkhronos.extensions.rules.record import Record
from synkhronos.extensions.rules.rule import Rule, TrainingStep, make_step
from synkhronos.extensions.rules.training import train

__all__ = [
    "ASGD", "BSP", "DiLoCo", "Downpour", "EASGD", "GoSGD", "LocalSGD", "Record", "Rule", "SSP",
    "TrainingStep", "make_step", "train",
]  # fmt: skip
