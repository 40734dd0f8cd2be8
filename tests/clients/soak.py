"""Keeps a running server busy with all that clients do, and checks that nothing comes of it.

usage: soak.py URL [--requests N | --minutes M] [--at-once N] [--seed N] [--pid PID] [--idle N]

Each of some fifty requests is made alone first. Then N clients at once make them in random order, whole and as streams,
among requests that are wrong, that leave early, and that are not even JSON. Every reply that is completed must be the one
that the request had alone. At the end the server must have nothing in flight, no keys and values but those of its prefix
cache, and (with --pid) no more memory than after the first fifth of the run, 5 % aside. With --idle, clients are then timed
beside that many connections that say nothing, slow bodies, long ones, and deep JSON: none may take more than twice as long
as the slowest did alone. Prints a summary; fails by an exception. Needs nothing but Python.
"""

import argparse
import collections
import http.client
import json
import os
import random
import resource
import socket
import threading
import time
import urllib.parse

CHAT, TEXT, MESSAGES, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/embeddings"
PATIENCE = 120

parser = argparse.ArgumentParser()
parser.add_argument("url")
parser.add_argument("--requests", type=int, default=1000)
parser.add_argument("--minutes", type=float, help="instead of a number of requests")
parser.add_argument("--at-once", type=int, default=32)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--pid", type=int, help="the server's, whose memory and time are looked at")
parser.add_argument("--idle", type=int, default=0, help="connections that say nothing")
args = parser.parse_args()
address = urllib.parse.urlsplit(args.url)


def connect():
    return http.client.HTTPConnection(address.hostname, address.port, timeout=PATIENCE)


def send(connection, path, body):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {"content-type": "application/json"})
    return connection.getresponse()


# What is asked


def said(text):
    return [{"role": "user", "content": text}]


def cases():
    """Path and body of requests that are right, by a name."""
    tool = {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Rome", "Oslo"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["a", "b"]}},
        "required": ["name", "kind"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
    found = {}
    for seed in range(6):
        warm = {"seed": seed, "temperature": 0.9, "top_p": 0.95}
        text = f"Tell me about number {seed}."
        found |= {
            f"chat {seed}": (CHAT, {"messages": said(text), "max_tokens": 8 + 5 * seed, **warm}),
            f"likely {seed}": (CHAT, {"messages": said(text), "max_tokens": 8, "logprobs": True, "top_logprobs": 2, **warm}),
            f"form {seed}": (CHAT, {"messages": said(text), "max_tokens": 60, "response_format": form, **warm}),
            f"tools {seed}": (CHAT, {"messages": said(text), "max_tokens": 60, "tools": [tool], "tool_choice": "required", **warm}),
            f"text {seed}": (TEXT, {"prompt": text, "max_tokens": 12, "n": 1 + seed % 3, "stop": ["\n\n"], **warm}),
            f"long {seed}": (TEXT, {"prompt": f"{seed} " + "once upon a time " * 80 * (1 + seed % 2), "max_tokens": 6, **warm}),
            f"claude {seed}": (MESSAGES, {"messages": said(text), "max_tokens": 9, "temperature": 0, "system": "Be brief."}),
            f"vector {seed}": (EMBED, {"input": [text, "and another"], "pooling": ["mean", "last"][seed % 2]}),
        }
    return found


WRONG = [
    (CHAT, b"{", 400, None),
    (CHAT, b"[" * 50_000, 400, None),
    (CHAT, {"messages": said("x"), "temperature": -1}, 400, "temperature"),
    (CHAT, {"messages": said("x"), "temprature": 1}, 400, "temprature"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": said("x"), "model": "../none"}, 404, "model"),
    (CHAT, {"messages": said("x"), "response_format": {"type": "yaml"}}, 400, "response_format.type"),
    (TEXT, {"prompt": [10**9]}, 400, "prompt"),
    (TEXT, {"prompt": "x", "stop": [""]}, 400, "stop"),
    (TEXT, {"prompt": "x", "logit_bias": {"99999999": 1}}, 400, "logit_bias"),
]


# What is answered


def essence(path, answer):
    """What of an answer must be the same each time."""
    if path == MESSAGES:
        return [answer.get("content"), answer.get("stop_reason")]
    if path == EMBED:
        return answer.get("data")
    without_ids = lambda message: message | {
        "tool_calls": [call | {"id": None} for call in message.get("tool_calls") or []]
    }
    return [choice | {"message": without_ids(choice.get("message") or {})} for choice in answer["choices"]]


def joined(path, lines):
    """Texts and reasons of a stream, by choice; None for one that broke off."""
    texts, reasons, ended = collections.defaultdict(str), {}, False
    for line in lines:
        if not line.startswith("data: "):
            continue
        ended = line == "data: [DONE]" or '"message_stop"' in line
        if line == "data: [DONE]":
            break
        event = json.loads(line[6:])
        assert "error" not in event, event
        if path == MESSAGES:
            delta = event.get("delta") or {}
            texts[0] += delta.get("text", "")
            reasons[0] = delta.get("stop_reason") or reasons.get(0)
        for choice in event.get("choices", []):
            delta = choice.get("delta", choice)
            texts[choice["index"]] += delta.get("content") or delta.get("text") or ""
            reasons[choice["index"]] = choice["finish_reason"] or reasons.get(choice["index"])
    return (dict(texts), reasons) if ended else None


def as_stream(path, answer):
    """The same of a whole answer."""
    if path == MESSAGES:
        return {0: "".join(part.get("text", "") for part in answer["content"])}, {0: answer["stop_reason"]}
    texts = {c["index"]: (c.get("message", {}).get("content") if path == CHAT else c["text"]) or "" for c in answer["choices"]}
    return texts, {c["index"]: c["finish_reason"] for c in answer["choices"]}


# The server seen from outside


def metrics():
    """Values of /metrics, each summed over its labels."""
    connection = connect()
    connection.request("GET", "/metrics")
    values = collections.Counter()
    for line in connection.getresponse().read().decode().splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            values[name.split("{")[0]] += float(value)
    return values


def resident():
    """Megabytes of memory that the server has."""
    with open(f"/proc/{args.pid}/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmRSS"))


def cpu_seconds():
    with open(f"/proc/{args.pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def until(what, condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} after {seconds} s: {dict(metrics())}"
        time.sleep(0.05)


# The soak


class Client(threading.Thread):
    """Makes requests over one connection, as long as the run goes on."""

    def __init__(self, number, alone, tally):
        super().__init__()
        self.dice = random.Random(args.seed * 1000 + number)
        self.alone, self.tally = alone, tally
        self.connection = connect()
        self.failure = None

    def run(self):
        try:
            while self.tally.more():
                begun = time.monotonic()
                kind = self.dice.choices(["whole", "stream", "leave", "wrong"], [45, 30, 15, 10])[0]
                getattr(self, kind)()
                self.tally.count(kind, time.monotonic() - begun)
        except Exception as error:
            self.failure = error
            self.tally.stop = True

    def pick(self):
        name = self.dice.choice(list(self.alone))
        return (name, *self.alone[name])

    def whole(self):
        name, path, body, status, answer = self.pick()
        response = send(self.connection, path, body)
        text = response.read()
        assert response.status == status, (name, response.status, text[:300])
        if status == 200:
            assert essence(path, json.loads(text)) == essence(path, answer), f"{name}: not as alone: {text[:2000]}"

    def stream(self):
        name, path, body, status, answer = self.pick()
        if path == EMBED or status != 200:
            return self.whole()
        begun = time.monotonic()
        response = send(self.connection, path, body | {"stream": True})
        lines = []
        while line := response.readline():
            if not lines:
                self.tally.count("first event", time.monotonic() - begun)
            lines.append(line.decode().rstrip("\n"))
        assert joined(path, lines) == as_stream(path, answer), f"{name}: not as alone: {lines}"

    def leave(self):
        """Sends a request that would take long, and goes: at once, or when something has come."""
        connection = connect()
        body = {"prompt": "x" * self.dice.choice([1, 2000]), "max_tokens": 3000, "ignore_eos": True, "stream": self.dice.random() < 0.7}
        connection.request("POST", TEXT, json.dumps(body))
        time.sleep(self.dice.random() * 0.1)
        if body["stream"] and self.dice.random() < 0.5:
            connection.getresponse().read(50)
        connection.close()

    def wrong(self):
        path, body, status, field = self.dice.choice(WRONG)
        response = send(self.connection, path, body)
        error = json.loads(response.read())["error"]
        assert (response.status, error["param"]) == (status, field), (body, error)


class Tally:
    """How far the run is, and what has been seen of it."""

    def __init__(self):
        self.lock = threading.Lock()
        self.begun = time.monotonic()
        self.started, self.stop = 0, False
        self.seconds = collections.defaultdict(list)
        self.memory = []

    def done(self):
        if args.minutes:
            return (time.monotonic() - self.begun) / (60 * args.minutes)
        return self.started / args.requests

    def more(self):
        with self.lock:
            if self.stop or self.done() >= 1:
                return False
            self.started += 1
            return True

    def count(self, kind, seconds):
        with self.lock:
            self.seconds[kind].append(seconds)

    def watch(self):
        """Notes the memory until the run ends."""
        self.memory.append((0, resident()))
        while not self.stop and self.done() < 1:
            time.sleep(0.2 if not args.minutes else 1)
            self.memory.append((self.done(), resident()))


def solo():
    """What each request gets alone: path, body, status and answer."""
    alone, connection = {}, connect()
    for name, (path, body) in cases().items():
        response = send(connection, path, body)
        alone[name] = (path, body, response.status, json.loads(response.read()))
        assert response.status in (200, 400), (name, alone[name])
    answered = sum(status == 200 for _, _, status, _ in alone.values())
    print(f"{len(alone)} requests alone, {answered} of them answered, the others refused", flush=True)
    assert answered > len(alone) / 2, alone
    return alone


def soak():
    alone = solo()
    tally = Tally()
    clients = [Client(number, alone, tally) for number in range(args.at_once)]
    watcher = threading.Thread(target=tally.watch if args.pid else lambda: None)
    for thread in [*clients, watcher]:
        thread.start()
    for thread in [*clients, watcher]:
        thread.join()
    for client in clients:
        if client.failure:
            raise client.failure
    for kind, seconds in sorted(tally.seconds.items()):
        seconds.sort()
        p50, p99 = (1000 * seconds[int(len(seconds) * part)] for part in (0.5, 0.99))
        print(f"{kind:12} {len(seconds):7}   p50 {p50:8.1f} ms   p99 {p99:8.1f} ms", flush=True)
    until("requests in flight", lambda: metrics()["lmx_requests_in_flight"] == 0)
    until("keys and values held", lambda: metrics()["lmx_kv_bytes"] == metrics()["lmx_kv_cached_bytes"])
    assert metrics()["lmx_engine_panics_total"] == 0
    if args.pid:
        early = max((memory for done, memory in tally.memory if done <= 0.2), default=resident())
        most, end = max(memory for _, memory in tally.memory), resident()
        print(f"memory: {early:.1f} MB after a fifth of the run, {most:.1f} MB at most, {end:.1f} MB at the end")
        assert end <= 1.05 * early + 2, "it grows"


def probes(count):
    """Seconds that each of some requests takes, one after another."""
    seconds, connection = [], connect()
    for number in range(count):
        begun = time.monotonic()
        body = {"prompt": f"{number} once", "max_tokens": 120, "ignore_eos": True}
        response = send(connection, TEXT, body)
        assert response.status == 200, response.read()
        response.read()
        seconds.append(time.monotonic() - begun)
    return seconds


def hostile(stop):
    """Bodies that come slowly, are too long, or nest too deeply, one after another until `stop` is set."""
    slow = []
    for _ in range(20):
        slow.append(socket.create_connection((address.hostname, address.port)))
        slow[-1].sendall(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n".encode())
    while not stop.is_set():
        for connection in slow:
            try:
                connection.sendall(b"{")
            except OSError:
                # Its time was over.
                pass
        connection = connect()
        response = send(connection, CHAT, b'{"messages": ' + b"[" * 20_000)
        assert response.status == 400, response.read()
        connection.close()
        connection = socket.create_connection((address.hostname, address.port))
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {10**12}\r\n\r\n".encode())
        assert b" 413 " in connection.recv(100)
        connection.close()
        time.sleep(0.1)
    for connection in slow:
        connection.close()


def idle():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    probes(5)
    alone = probes(20)
    silent = []
    for number in range(args.idle):
        silent.append(socket.create_connection((address.hostname, address.port)))
        if number % 2:
            silent[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nhost: loc")
    stop = threading.Event()
    other = threading.Thread(target=hostile, args=[stop])
    other.start()
    # While all of them come in at once, the accept loop is busy with them.
    probes(5)
    # What other programs do to one try, they need not do to all of them.
    among = min((probes(20) for _ in range(5)), key=max)
    stop.set()
    other.join()
    print(f"beside {args.idle} silent connections: {1000 * max(among):.0f} ms at most; alone {1000 * max(alone):.0f} ms")
    assert max(among) <= 2 * max(alone) + 0.1, (alone, among)
    if args.pid:
        before, begun = cpu_seconds(), time.monotonic()
        time.sleep(3)
        share = (cpu_seconds() - before) / (time.monotonic() - begun)
        print(f"idle: {100 * share:.2f} % of a core")
        assert share < 0.01
    for connection in silent:
        connection.close()


soak()
if args.idle:
    idle()
print("all ok")
