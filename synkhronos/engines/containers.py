"""Detects that a script sets the value of a shared variable.

``set_value`` assigns to the attribute ``value`` of the variable's container; compiled functions write to
the list inside it, and so does the engine. So a container of another class, which reports assignments,
notices the script's assignments and nothing else, and adds no cost to a call.
"""

import copyreg

from synkhronos.engines.names import Container


class ReportingContainer(Container):
    """A container that calls ``notify()`` after each assignment. Its copies are ordinary containers."""

    def __set__(self, value):
        Container.__set__(self, value)
        self.notify()

    value = data = property(Container.__get__, __set__)

    def __reduce_ex__(self, protocol):
        state = dict(vars(self))
        del state["notify"]
        return copyreg._reconstructor, (Container, object, None), state

    def __deepcopy__(self, memo):
        plain = Container.__new__(Container)
        vars(plain).update(self.__reduce_ex__(2)[2])
        return plain.__deepcopy__(memo)


def report_assignments(container, notify):
    """Call ``notify()`` when a script assigns to this container; stop if it is None."""
    if notify is not None and type(container) is Container:
        container.__class__ = ReportingContainer
    if type(container) is ReportingContainer:
        container.notify = notify
        if notify is None:
            del container.notify
            container.__class__ = Container
