#!/usr/bin/env python3
"""Installs the Python clients that drive the server in the tests.

    scripts/fetch_clients.py INTO

They go into a folder of their own and change nothing of the machine's Python. What is there already is not fetched again.
"""

import subprocess
import sys
from pathlib import Path

WANTED = Path(__file__).resolve().parent.parent / "tests" / "clients" / "requirements.txt"


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__.strip())
    into = Path(sys.argv[1])
    stamp = into / "installed.txt"
    if stamp.exists() and stamp.read_text() == WANTED.read_text():
        print(f"{into}: there")
        return
    words = ["--quiet", "--disable-pip-version-check", "--upgrade", "--target", into, "--requirement", WANTED]
    done = subprocess.run([sys.executable, "-m", "pip", "install", *words])
    if done.returncode:
        sys.exit("error: pip could not install the clients; its reason stands above (network? disk space?)")
    stamp.write_text(WANTED.read_text())


if __name__ == "__main__":
    main()
