"""Starts a worker's Python with variables from a file that only its user can read: `python launch.py FILE COMMAND`.

Values of `run.env` may be secrets, and Ray writes the `env_vars` of a runtime_env into its logs and into process
arguments, which all users of a host can read. The variables must be set before Python starts, since Python and imported
libraries read some of them at once. This file runs as a script and must not import the rest of the package.
"""

from __future__ import annotations

import json
import os
import re
import sys

_NAME = re.compile(r"\$\{[A-Z0-9_]+\}")


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        for name, value in json.load(file).items():
            os.environ[name] = _NAME.sub("", os.path.expandvars(value))  # as Ray does with env_vars
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
