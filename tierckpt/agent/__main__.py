"""``python -m tierckpt.agent``: the agent's process, started by the first trainer that needs it.

It inherits the listening socket as a descriptor, so that whoever started it can connect at once.
"""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

from tierckpt.agent.runtime import Home
from tierckpt.agent.server import Server


def main() -> None:
    parser = argparse.ArgumentParser(prog="tierckpt.agent")
    parser.add_argument("--listener", type=int, required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--run", required=True)
    options = parser.parse_args()
    listener = socket.socket(fileno=options.listener)
    listener.set_inheritable(False)
    Server(Home(Path(options.folder), options.name), listener, node=options.node, run=options.run).serve()


if __name__ == "__main__":
    main()
