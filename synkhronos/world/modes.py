"""When the calls of a world are verified."""

#: The first call; every call; none; the first call, with an error in place of a warning.
FIRST, ALWAYS, OFF, RAISE = MODES = ("first", "always", "off", "raise")
