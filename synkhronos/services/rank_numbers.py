"""Arrays in the commons with a number for each rank, which only the rank itself sets."""

#: Its clock, how often it was replaced, and whether it has ended its program
CLOCKS, RESTARTS, ENDED = NAMES = "clocks", "restarts", "ended"
