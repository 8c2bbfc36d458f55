"""Questions to the controller, which is a process on the first machine.

On other machines, the progress process stands in for the controller: it holds the lock that shows the
ranks that the controller is alive, passes on the questions, and writes the answers.
"""

from __future__ import annotations

import pickle
from typing import Any

from synkhronos.machines.relay.part import RelayContext, RelayPart
from synkhronos.services import controller

_HOME = 0


class RelayedQuestions(RelayPart):
    """Passes on questions of this machine's ranks, or answers of the controller on this machine."""

    name = "questions"

    def __init__(self, context: RelayContext) -> None:
        super().__init__(context)
        self._is_home = context.machine == _HOME
        self._state = controller.state_of(self.named_memory)
        self._alive = controller.is_alive_lock(self.named_memory)
        ranks = [rank for rank in range(context.size) if (rank in context.own) != self._is_home]
        self._channels = controller.channels_of(self.named_memory, ranks, context.size)
        self._told = 0, False  # the state, and whether the controller is alive, as last sent

    def look(self) -> bool:
        changed = self._tell() if self._is_home else False
        for rank, channel in self._channels.items():
            complete = (channel.answer if self._is_home else channel.question).read_new()
            if complete is not None:
                to = self.context.machine_of(rank) if self._is_home else _HOME
                self.links.send(to, self.name, rank, *complete)
                changed = True
        return changed

    def _tell(self) -> bool:
        """Tell the other machines when the controller has started, and when it has died."""
        state = int(self._state[0])
        now = state, state == controller.READY and not self._alive.is_free()
        if now == self._told:
            return False
        self._told = now
        for machine in self.context.others:
            self.links.send(machine, self.name, None, *now)
        return True

    def take(self, source: int, rank: int | None, *content: Any) -> None:
        if rank is None:
            self._set_alive(*content)
            return
        channel = self._channels[rank]
        if self._is_home:
            channel.put(*content)
            return
        try:
            channel.reply(*content)
        except MemoryError as error:
            channel.reply(content[0], pickle.dumps((None, str(error))))

    def _set_alive(self, state: int, is_alive: bool) -> None:
        if is_alive:
            self._alive.try_acquire()
        elif not self._alive.is_free():
            self._alive.release()
        self._state[0] = state
