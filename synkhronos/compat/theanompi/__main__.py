"""``python -m synkhronos.compat.theanompi``: the session that ``tmlauncher`` starts."""

import argparse
import importlib
from typing import Callable, Dict, Union

from synkhronos.compat import theanompi
from synkhronos.compat.theanompi.rules import BSP, EASGD, GOSGD

RULES: Dict[str, Callable[[], Union[BSP, EASGD, GOSGD]]] = {"BSP": BSP, "EASGD": EASGD, "GOSGD": GOSGD}


def main() -> None:
    """Train a model. The arguments come from ``tmlauncher``, which has checked them."""
    parser = argparse.ArgumentParser(prog="python -m synkhronos.compat.theanompi")
    parser.add_argument("rule", choices=list(RULES))
    parser.add_argument("modelfile")
    parser.add_argument("modelclass")
    parser.add_argument("--devices", help="with commas; without, launch has set them")
    parser.add_argument("--sync-type", choices=["avg", "cdd"])
    parser.add_argument("--exch-strategy")
    given = parser.parse_args()
    theanompi.install()
    importlib.import_module("theanompi")  # so that models find models.layers2, too
    rule = RULES[given.rule]()
    if isinstance(rule, BSP):
        rule.sync_type = given.sync_type
        rule.exch_strategy = given.exch_strategy or rule.exch_strategy
    devices = given.devices.split(",") if given.devices else None
    rule.init(devices, given.modelfile, given.modelclass)
    rule.wait()


if __name__ == "__main__":
    main()
