"""Programs that are measured beside each other, and how: for bench/compare and bench/all."""

import json
import os
import platform
import resource
import statistics
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
DECODE = 64
BATCH_PROMPT, BATCH_DECODE = 32, 32
MEMORY_CONTEXT = 4096
START_PROMPT = "Tell me in three short sentences why the sky is blue and why the sunset is red today please"


def median_interval(values):
    """The median and its 95 % interval, by the binomial distribution of ranks."""
    values, n = sorted(values), len(values)
    weights = [1]
    for k in range(n):
        weights.append(weights[-1] * (n - k) // (k + 1))
    low, below = 0, 0
    while below + weights[low] <= 0.025 * 2**n and low < n // 2:
        below += weights[low]
        low += 1
    return statistics.median(values), values[max(low - 1, 0)], values[min(n - low, n - 1)]


class Failed(Exception):
    """A program that cannot be measured."""


@dataclass(frozen=True)
class Test:
    kind: str
    number: int = 0

    def name(self):
        return f"{self.kind}-{self.number}" if self.kind in ("prefill", "decode", "batch") else self.kind

    def what(self):
        return {
            "prefill": f"prefill {self.number}, tok/s",
            "decode": f"decode at {self.number}, tok/s",
            "batch": f"decode of {self.number} sequences, tok/s",
            "start": "start to first token, s",
            "memory": f"peak memory at {MEMORY_CONTEXT}, MB",
        }[self.kind]

    def less_is_better(self):
        return self.kind in ("start", "memory")

    def digits(self):
        return {"start": 3, "memory": 0}.get(self.kind, 1)


TESTS = [
    *(Test("prefill", n) for n in (512, 4096)),
    *(Test("decode", n) for n in (0, 512, 4096)),
    *(Test("batch", n) for n in (8, 32)),
    Test("start"),
    Test("memory"),
]


class Meter:
    """The share of the machine's CPU time that programs other than our children took."""

    def __enter__(self):
        self.start = self.read()
        return self

    def __exit__(self, *_):
        total, busy, ours = (after - before for before, after in zip(self.start, self.read()))
        self.others = max(0.0, busy - ours) / total if total > 0 else 0.0

    @staticmethod
    def read():
        ticks = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        second = os.sysconf("SC_CLK_TCK")
        idle = ticks[3] + ticks[4]
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return sum(ticks) / second, (sum(ticks) - idle) / second, usage.ru_utime + usage.ru_stime


@dataclass
class Outcome:
    """What a program printed, how long it ran, the most memory it held, and what others took meanwhile."""

    stdout: str
    seconds: float
    megabytes: float
    others: float


def run(command, limit=None, **options):
    """Runs a program to its end, `limit` seconds at most."""
    words = [str(word) for word in command]
    with Meter() as meter, tempfile.TemporaryFile("w+") as errors:
        start = time.monotonic()
        child = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True, **options
        )
        alarm = threading.Timer(limit, child.kill) if limit else None
        if alarm:
            alarm.start()
        stdout = child.stdout.read()
        # Waited for by hand, since only that tells what this one child used.
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - start
        if alarm:
            alarm.cancel()
            if seconds >= limit:
                raise Failed(f"over {limit:.0f} s")
        errors.seek(0)
        stderr = errors.read()
    if child.returncode != 0:
        raise Failed(f"{' '.join(words)} ended with {child.returncode}:\n{stderr.strip()[-2000:]}")
    return Outcome(stdout, seconds, usage.ru_maxrss * 1024 / 1e6, meter.others)


class Lmx:

    def __init__(self, threads, limit=None):
        self.threads, self.limit = ["--threads", threads], limit
        built = self.build()
        self.example, self.program = built["throughput"], built["lmx"]
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=REPOSITORY, capture_output=True, text=True
        )
        self.version = commit.stdout.strip() or "unknown"

    @staticmethod
    def build():
        """{name: program}"""
        what = ["--package", "lmx", "--example", "throughput", "--package", "lmx-cli", "--bin", "lmx"]
        words = ["cargo", "build", "--release", "--locked", *what, "--message-format=json"]
        done = subprocess.run(words, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise Failed("lmx could not be built; cargo's reason stands above")
        messages = [json.loads(line) for line in done.stdout.splitlines()]
        return {m["target"]["name"]: m["executable"] for m in messages if m.get("executable")}

    def measure(self, model, test):
        """The test's value, and the share that others took."""
        if test.kind == "start":
            words = ["--ignore-chat-template", "--prompt", START_PROMPT, "--max-tokens", 1]
            out = run([self.program, "generate", "--model", model, *self.threads, *words], self.limit)
            return out.seconds, out.others
        shape = {
            "prefill": ["--prompt", test.number],
            "decode": ["--generate", DECODE, "--depth", test.number],
            "batch": ["--generate", BATCH_DECODE, "--depth", BATCH_PROMPT, "--batch", test.number],
            "memory": ["--prompt", MEMORY_CONTEXT],
        }[test.kind]
        out = run([self.example, model, *self.threads, *shape], self.limit)
        if test.kind == "memory":
            return out.megabytes, out.others
        return json.loads(out.stdout)["tokens_per_second"], out.others


class LlamaCpp:

    def __init__(self, folder, threads, flash_attention, limit=None):
        self.folder, self.threads, self.limit = folder, threads, limit
        self.flash_attention = "on" if flash_attention else "off"
        self.version = "unknown"

    def run(self, program, model, *words):
        common = ["-m", model, "-t", self.threads, "-fa"]
        return run([self.folder / program, *common, self.flash_attention, *words], self.limit)

    def measure(self, model, test):
        """The test's value, and the share that others took."""
        if test.kind == "start":
            words = ["-p", START_PROMPT, "-n", 1, "--no-warmup", "-no-cnv"]
            out = self.run("llama-completion", model, *words)
            return out.seconds, out.others
        if test.kind == "batch":
            context = test.number * (BATCH_PROMPT + BATCH_DECODE)
            shape = ["-npp", BATCH_PROMPT, "-ntg", BATCH_DECODE, "-npl", test.number, "-c", context]
            out = self.run("llama-batched-bench", model, *shape, "--output-format", "jsonl")
            line = next(line for line in out.stdout.splitlines() if line.startswith("{"))
            return json.loads(line)["speed_tg"], out.others
        shape = {
            "prefill": ["-p", test.number, "-n", 0],
            "decode": ["-p", 0, "-n", DECODE, "-d", test.number],
            "memory": ["-p", MEMORY_CONTEXT, "-n", 0],
        }[test.kind]
        out = self.run("llama-bench", model, *shape, "-r", 1, "-o", "json")
        result = json.loads(out.stdout)[0]
        self.version = f"{result['build_commit']} ({result['build_number']})"
        return (out.megabytes if test.kind == "memory" else result["avg_ts"]), out.others


def spread(values, digits):
    low, middle, high = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    )
    return f"{middle:.{digits}f} [{low:.{digits}f}–{high:.{digits}f}]"


def machine():
    info = Path("/proc/cpuinfo").read_text()
    model = next((line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")), "?")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    # What a distribution adds to the kernel's version tells nothing here.
    kernel = platform.release().split("-")[0]
    return f"{model}, {os.cpu_count()} CPUs, {memory} GiB, Linux {kernel}"
