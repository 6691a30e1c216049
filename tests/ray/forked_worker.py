"""Ray starts a worker by this script: it asks the fork server of the tests for a process and lives as long as that.

Takes the place of Ray's `setup_worker.py`, which would start an interpreter and a shell, and then another interpreter
that imports torch. Imports little: each start pays for it.
"""

from __future__ import annotations

import json
import os
import socket
import sys

SOCKET = "ELASTIC_RING_TEST_FORK_SERVER"
"""The environment variable with the server's socket."""


def main() -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[SOCKET])
        request = json.dumps({"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}).encode()
        socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
        server.sendall(request)
        server.recv(1)  # the worker holds the other end until it ends


if __name__ == "__main__":
    main()
