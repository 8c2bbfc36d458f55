"""Checks whether a rank still needs to wait: it does not for a dead, late or missing rank."""

import os
import time

from synkhronos._errors import (
    REMEDY,
    CollectiveAbortedError,
    MissingRankError,
    SynkhronosError,
    WorldBrokenError,
)
from synkhronos.transports.base import Transport, do_nothing

CHECK_INTERVAL = 0.2  # seconds between checks that the other processes are alive


class WatchfulTransport(Transport):
    """A transport whose ranks check each other while they wait and between waits.

    Attributes
    ----------
    _children : Children
    _milestones : Milestones
    _master_pid : int
    _passed : int
        The number of barriers that this rank has passed in this command.
    _while_waiting : callable
        Called by the master while it waits.
    """

    _while_waiting = staticmethod(do_nothing)
    _checked = 0.0  # when `check` last looked at the processes
    _cause = f"the workers were ended from another thread; {REMEDY}"  # why they were ended

    def check(self):
        if self.is_copy:
            raise SynkhronosError(
                f"this process was forked from rank {self.labels[self.rank]}, and only that one may use "
                f"the other ranks; end this one by os._exit()"
            )
        if self._milestones.aborted:
            raise CollectiveAbortedError(
                f"rank {self.labels[self.rank]} left the program: another rank failed in it"
            )
        now = time.monotonic()
        if now - self._checked > CHECK_INTERVAL:
            self._checked = now
            if self.rank != self.master_rank:
                self._check_master()
            elif self.size > 1:
                self._check_workers()

    def _check_others(self, waited, inside):
        """Raise if nobody needs to wait any longer; return the seconds of waiting that count."""
        if inside:
            self._check_missing()
        if self.rank != self.master_rank:
            self._check_master()
            if inside and self.in_program and self._is_late(waited):
                raise SynkhronosError(
                    f"rank {self.labels[self.rank]} waited longer than fork(timeout={self.timeout}) "
                    f"seconds inside a program, for {self._describe_late()}"
                )
            return waited
        self._check_workers()
        self._while_waiting()
        if self.in_program and not inside and not self._milestones.aborted:
            if self.timeout is None or not self._children.find_stopped():
                return 0.0  # a program may take any time
        self._check_late(waited)
        return waited

    def _is_late(self, waited):
        return self.timeout is not None and waited > self.timeout

    def _check_late(self, waited):
        """In the master: end all workers and raise if it has waited too long."""
        if self._is_late(waited):
            late = self._describe_late()
            self._end_workers(
                f"a barrier lasted longer than fork(timeout={self.timeout}) seconds, for {late}; "
                f"every worker was ended; {REMEDY}"
            )

    def _end_workers(self, cause):
        # A program on the leader of a machine may catch the error, or reply with it. The next one must
        # name the cause, too.
        self._cause = cause
        self.kill()
        raise WorldBrokenError(cause)

    def _check_missing(self):
        """Raise if a rank has ended the command and will never reach this barrier."""
        missing = self._milestones.missing(self._passed)
        if missing and not self._milestones.aborted:
            listed = (
                "rank"
                + "s" * (len(missing) > 1)
                + " "
                + ", ".join(str(self.labels[rank]) for rank in missing)
            )
            raise MissingRankError(
                f"rank {self.labels[self.rank]} waits in a collective for {listed}, which ended the "
                f"program without it; let every rank call the same collectives in the same order"
            )

    def _describe_late(self):
        stopped = self._children.find_stopped()
        if stopped:
            return ", ".join(f"rank {self.labels[rank]} (stopped, as by SIGSTOP)" for rank in stopped)
        return self._milestones.describe_late(self.rank, self.labels)

    def _check_master(self):
        if os.getppid() != self._master_pid:
            os._exit(1)

    def _check_workers(self):
        """If a worker is dead, end all workers and raise `WorldBrokenError`."""
        if self._children.are_ended:
            raise WorldBrokenError(self._cause)
        dead = self._children.find_dead()
        if not dead:
            return
        if self.in_program and self._on_death is not None:
            return self._on_death(dead)
        causes = ", ".join(f"rank {self.labels[rank]} ({cause})" for rank, cause in dead.items())
        self._end_workers(f"a worker died: {causes}; the others were ended; {REMEDY}")
