"""Threads that take turns as a schedule says, and all schedules of some threads."""

import sys
import threading


_PATIENCE = 100  # waits after which no thread will ever go on


class Deadlock(AssertionError):
    """Every thread waits for another one."""


class Schedule:
    """Runs functions in threads, of which one runs at a time; it changes at calls of `switch` only.

    Where several threads can run, the next of `choices` is the number of the one that does, and later
    0: the one that runs, if it can go on.
    """

    def __init__(self, choices):
        self._choices = list(choices)
        self.taken = []  # at each place: the choice, of how many, and whether the thread could go on
        self._idle = {}  # a lock for each thread that has not ended
        self._waiting, self._waits = set(), 0
        self._errors = []

    def run(self, functions):
        """Run functions, one in each thread; raise what one of them raises."""
        threads = []
        for function in functions:
            thread = threading.Thread(target=self._run, args=(function,), daemon=True)
            self._idle[thread] = threading.Lock()
            self._idle[thread].acquire()
            threads.append(thread)
        for thread in threads:
            thread.start()
        self._pass_on()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive(), "a thread hangs"
        for error in self._errors:
            raise error

    def _run(self, function):
        own = threading.current_thread()
        self._idle[own].acquire()
        try:
            function()
        except BaseException as error:
            self._errors.append(error)
        finally:
            del self._idle[own]
            self._waiting.clear()
            self._pass_on()

    def switch(self, waits=False):
        """Let another thread run; if this one `waits`, one that does not wait, if there is one."""
        own = threading.current_thread()
        if own not in self._idle:  # not a thread of this schedule
            return
        if waits:
            self._waiting.add(own)
            self._waits += 1
            if self._waits > _PATIENCE:
                raise Deadlock("all threads wait")
        else:
            self._waiting.clear()
        if self._pass_on(own):
            self._idle[own].acquire()

    def _pass_on(self, own=None):
        """Choose a thread and let it run; return whether it is another one."""
        able = [one for one in self._idle if one not in self._waiting] or [*self._idle]
        able.sort(key=lambda one: one is not own)
        if not able:
            return False
        choice = 0
        if len(able) > 1:
            choice = self._choices[len(self.taken)] if len(self.taken) < len(self._choices) else 0
            self.taken.append((choice, len(able), able[0] is own))
        chosen = able[choice]
        if chosen is own:
            return False
        self._idle[chosen].release()
        return True


def all_schedules(functions_for, preemptions=None):
    """Run functions in all schedules, or in those with few preemptions; return how many.

    ``functions_for(schedule)`` returns the functions to run, and one to call after them. A change from
    a thread that waits or has ended is no preemption.
    """
    choices, count = [], 0
    while choices is not None:
        schedule = Schedule(choices)
        functions, check = functions_for(schedule)
        schedule.run(functions)
        check()
        count += 1
        choices = _next(schedule.taken, preemptions)
    return count


def _next(taken, preemptions):
    """Return the choices of the schedule that follows one, or None after the last."""
    for place in reversed(range(len(taken))):
        choice, of, could_go_on = taken[place]
        before = sum(one > 0 and goes_on for one, _, goes_on in taken[:place])
        if choice + 1 < of and (preemptions is None or before + could_go_on <= preemptions):
            return [one for one, *_ in taken[:place]] + [choice + 1]
    return None


def in_threads(work, n_threads=2):
    """Call ``work(number)`` in threads that are switched as often as possible; raise what one raises."""
    interval, errors = sys.getswitchinterval(), []

    def run(number):
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[number]) for number in range(n_threads)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    for error in errors:
        raise error
