"""Errors that the user can fix, reported without a traceback."""

import sys
from pathlib import Path

import synkhronos


class UserError(Exception):
    """Unusable options or files; the message says why."""


def run(main):
    """Run a script; report errors that the user can fix without a traceback."""
    try:
        main()
    except KeyboardInterrupt:  # the workers end with the script
        problem = "interrupted"
    except UserError as error:
        problem = str(error)
    except synkhronos.WorkerError as error:
        if error.type_name != UserError.__name__:
            raise
        problem = error.message
    else:
        return
    # Below the message Theano adds the node of the graph.
    sys.exit(f"{Path(sys.argv[0]).name}: {problem.splitlines()[0]}")
