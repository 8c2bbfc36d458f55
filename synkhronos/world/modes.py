"""When the calls of a world are verified, and what a second thread may do."""

#: The first call; every call; none; the first call, with an error in place of a warning.
FIRST, ALWAYS, OFF, RAISE = MODES = ("first", "always", "off", "raise")

#: A call while another thread makes one is refused, or waits.
REFUSE, WAIT = THREADS = ("refuse", "wait")
