"""``python -m synkhronos.compat.theanompi``: the session that ``tmlauncher`` starts."""

import importlib
import sys

from synkhronos.compat import theanompi
from synkhronos.compat.theanompi import rules
from synkhronos.compat.theanompi.launcher import read_arguments


def main() -> None:
    """Train a model. The arguments are options of ``tmlauncher``, which has checked them."""
    session = read_arguments(sys.argv[1:])
    theanompi.install()
    importlib.import_module("theanompi")  # so that models find models.layers2, too
    rule = getattr(rules, session.rule)()
    if isinstance(rule, rules.BSP):
        rule.sync_type = session.sync_type
        rule.exch_strategy = session.exch_strategy or rule.exch_strategy
    host, devices = session.devices[0]
    rule.init(None if host else devices, session.modelfile, session.modelclass)  # launch has set others
    rule.wait()


if __name__ == "__main__":
    main()
