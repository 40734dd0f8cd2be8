"""Building lmx, and running a server of it, for the scripts beside this file."""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
# Longer than the server's grace period.
STOP_SECONDS = 60


def built(example=None):
    """The program, or an example of the library, built for release."""
    what = ["-p", "lmx", "--example", example] if example else ["-p", "lmx-cli"]
    subprocess.run(["cargo", "build", "--release", "--locked", *what], cwd=REPOSITORY, check=True)
    target = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target")) / "release"
    return target / "examples" / example if example else target / "lmx"


@contextlib.contextmanager
def serving(program, *words):
    """Runs a server on a free port: its address, and its process. What it logs goes to standard error."""
    command = [program, "server", "--port", "0", "--log-level", "warning", *words]
    server = subprocess.Popen([str(word) for word in command], stderr=subprocess.PIPE, text=True)
    try:
        url = address(server.stderr)
        # A pipe that nobody reads would stop the server once it is full.
        threading.Thread(target=shutil.copyfileobj, args=[server.stderr, sys.stderr], daemon=True).start()
        yield url, server
    finally:
        code = stop(server)
    if code:
        sys.exit(f"error: the server ended with {code}")


def address(lines):
    """Where the server listens, as it says among its first lines."""
    for line in lines:
        sys.stderr.write(line)
        if line.startswith("lmx serves "):
            return line.split(" on ")[-1].strip()
    sys.exit("error: the server did not start")


def stop(server):
    """Ends the server; its exit code."""
    server.terminate()
    try:
        return server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        return server.wait()
