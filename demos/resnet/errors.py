"""What a user can mend, told without a traceback."""

import sys
from pathlib import Path

import synkhronos


class UserError(Exception):
    """Options or files with which nothing can be done, and why."""


def run(main):
    """Runs a script; what a user can mend is a message without a traceback."""
    try:
        main()
    except KeyboardInterrupt:  # the workers are ended as the script ends
        problem = "interrupted"
    except UserError as error:
        problem = str(error)
    except synkhronos.WorkerError as error:
        if error.type_name != UserError.__name__:
            raise
        problem = error.message
    else:
        return
    # Theano adds, below the message, which node of the graph it was.
    sys.exit(f"{Path(sys.argv[0]).name}: {problem.splitlines()[0]}")
