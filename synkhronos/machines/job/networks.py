"""The networks that the machines of a job share, to which MPI's messages are limited.

A private network inside of a machine, as container software makes one, often has the same address on
each machine. MPI would try to reach the others by it, and wait for ever.
"""

import ipaddress
import itertools
import json
import re
import subprocess
from collections import Counter
from typing import List, Mapping, Sequence

#: Prints the addresses of this machine, with the lengths of their prefixes, and whether each is in use
ASK = """
import ipaddress, json, psutil, socket
facts, found = psutil.net_if_stats(), {}
for name, addresses in psutil.net_if_addrs().items():
    for one in addresses:
        if one.family == socket.AF_INET and not ipaddress.ip_address(one.address).is_loopback:
            found[f"{one.address}/{one.netmask}"] = name in facts and facts[name].isup
print(json.dumps({"networks": found}), flush=True)
"""
_LIMIT = 30.0  # seconds
_OPTION = "btl_tcp_if_include"


def options(line: Sequence[str], machines: int, given: Sequence[str]) -> List[str]:
    """Return the options of mpirun for the networks of some machines; none if MPI may use all.

    Parameters
    ----------
    line : list of str
        The command that runs `ASK` on each machine.
    machines : int
        Their number.
    given : sequence of str
        The user's own options and variables. If they name networks, nothing is chosen.
    """
    if machines < 2 or any("if_include" in one or "if_exclude" in one for one in given):
        return []
    try:
        null = subprocess.DEVNULL
        done = subprocess.run(line, stdin=null, capture_output=True, text=True, timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        return []  # the job will say what is wrong
    # Those of two machines may be in one line.
    answers = re.findall(r'{"networks": {[^}]*}}', done.stdout)
    if len(answers) != machines:
        return []
    chosen = choose([json.loads(one)["networks"] for one in answers])
    return ["--mca", _OPTION, ",".join(chosen)] if chosen else []


def choose(machines: Sequence[Mapping[str, bool]]) -> List[str]:
    """Return the networks by which machines can reach each other; none if these are all that they have.

    These are the networks that all of them have. If there is none, there may be routes between different
    networks. A network does not count where another machine has the same address, or while it is idle.

    Parameters
    ----------
    machines : sequence of dict
        The addresses of each machine, such as ``10.0.0.1/24``, and whether each is in use.
    """
    holders = Counter(itertools.chain.from_iterable({_address(one) for one in has} for has in machines))
    usable = [
        {_network(one) for one, in_use in has.items() if in_use and holders[_address(one)] == 1}
        for has in machines
    ]
    chosen = set.intersection(*usable) or set.union(*usable)
    present = {_network(one) for has in machines for one in has}
    if chosen == present or not all(chosen & one for one in usable):
        return []
    return sorted(chosen)


def _address(interface: str) -> str:
    return interface.partition("/")[0]


def _network(interface: str) -> str:
    return str(ipaddress.ip_interface(interface).network)
