"""A training and the machine that judges it, over real TLS: whatever the other side does, the weights stay what they are."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import trainprobe
from trainprobe.errors import StopTraining
from trainprobe.op_check.online import certs
from trainprobe.op_check.online.credentials import context
from trainprobe.op_check.online.frames import Decoder, Kind, WireFrame, encode

OPS = ["gelu", "linear"]
SERVER = [sys.executable, "-m", "trainprobe", "op-check", "serve", "--patience", "3", "--device", "cpu"]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.gelu(self.wide(x)))


def train(*, between: Callable[[int], None] = lambda step: None, steps: int = 4, **plan: Any) -> tuple[list[torch.Tensor], Any]:
    """Train; return the weights with the random state, and the probe. between: called after each step."""
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    settings = {"level": "off", "sinks": [], "console": False}
    with trainprobe.watch(model, optimizer, **settings, **plan) as probe:
        for step in range(steps):
            x = torch.randn(3, 8)
            with probe.step():
                optimizer.zero_grad()
                nn.functional.dropout(model(x), 0.1).square().sum().backward()
                optimizer.step()
            between(step)
    return [*(p.detach().clone() for p in model.parameters()), torch.get_rng_state()], probe


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def bare() -> list[torch.Tensor]:
    return train()[0]


@pytest.fixture(scope="module")
def keys(require: Callable[[str], ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys of both sides; `other`: the same from another CA; `late`: expired ones of this CA; `bad`: revoked ones of it."""
    require("cryptography")
    folder = tmp_path_factory.mktemp("keys")
    certs.make(folder, days=1)
    certs.make(folder / "other", days=1)
    authority = certs._Authority()
    authority.read(folder / "ca")
    for side in certs.SIDES:
        (folder / "late").mkdir(exist_ok=True)
        authority.issue(folder / "late" / side, side, ["127.0.0.1"] if side == "server" else [], -1)
        (folder / "late" / side / "ca.pem").write_bytes((folder / "ca" / "cert.pem").read_bytes())
    return folder


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Serving:
    """A server process on this machine."""

    def __init__(self, folder: Path, *options: str, port: int | None = None) -> None:
        self.folder = folder
        self.log = folder / "log.txt"
        self.port = port or free_port()
        folder.mkdir(parents=True, exist_ok=True)
        way = ("--listen", f"127.0.0.1:{self.port}")
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "400"}
        with self.log.open("a") as log:
            command = [*SERVER, *way, "--output", str(folder), *options]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def wait_for(self, pattern: str, seconds: float = 60.0) -> str:
        end = time.monotonic() + seconds
        while re.search(pattern, text := self.log.read_text()) is None:
            assert self.process.poll() is None, f"the server ended: {text}"
            assert time.monotonic() < end, f"no {pattern!r} in {text}"
            time.sleep(0.02)
        return text

    def end(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


@pytest.fixture(scope="module")
def server(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "shared").mkdir()
    serving = Serving(folder, *("--tls", str(keys / "server"), "--connections", "2", "--folder", str(folder / "shared")))
    yield serving
    serving.end(signal.SIGKILL)


def to(port: int, keys: Path | None = None, **more: Any) -> dict[str, Any]:
    """The section of a plan: two judged steps of a few calls, and short waits."""
    secure = {} if keys is None else {"tls": str(keys)}
    return {"server": f"127.0.0.1:{port}", "step": [0, 2], "ops": OPS, "patience": 3.0, "wait": 20.0, **secure, **more}


@pytest.fixture
def wrong_gelu() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    library.impl("gelu", lambda x, *, approximate="none": x * torch.sigmoid(1.702 * x), "CPU")
    try:
        yield
    finally:
        library._destroy()


def test_a_wrong_kernel_is_found_by_the_other_machine(wrong_gelu: None, server: Serving, keys: Path, tmp_path: Path) -> None:
    server.wait_for("listening on")
    without = train()[0]
    weights, probe = train(op_check=to(server.port, keys / "training", run="planted"), output=tmp_path)
    assert same(without, weights)
    errors = [f for f in probe.findings if f.severity == "error"]
    assert [(f.rule, f.step, f.place.rank) for f in errors] == [("op_check", 0, 0), ("op_check", 2, 0)]
    assert all("Functional.gelu.0.forward in root is a bug" in f.message for f in errors)
    assert all("the server's is nearer the truth" in f.message for f in errors), "three ways: its own kernel is right"
    assert re.fullmatch(r"op_check: 2 steps judged, \d+ calls \(.*, 2 bug\) by 127\.0\.0\.1:\d+\.", probe.sentences[-1])
    log = (tmp_path / "rank0" / "op_check.txt").read_text()
    assert log.count("[ERROR]") == 2
    assert "step 2 root Functional.gelu.0 (forward) fails" in log
    theirs = server.folder / "planted" / "rank0"
    summary = json.loads((theirs / "op_check.json").read_text())
    assert (summary["code"], summary["verdicts"]["bug"], summary["lost"]) == (2, 2, 0)
    assert summary["training"] == {"sent": summary["judged"], "left_out": 0, "unanswered": 0}
    assert len((theirs / "op_check.csv").read_text().splitlines()) > summary["judged"]
    (script,) = (theirs / "replay").glob("*.py")
    assert "gelu" in script.read_text()


def test_a_shared_folder_is_a_road_too(bare: list[torch.Tensor], server: Serving, tmp_path: Path) -> None:
    server.wait_for("looking into")
    shared = server.folder / "shared"
    odd = shared / "session-odd" / "to_server"
    odd.mkdir(parents=True)
    (odd / "0000000000.frame").write_bytes(b"garbage")
    (shared / "session-link").symlink_to(tmp_path)
    (tmp_path / "kept").touch()
    settings = {"folder": str(shared), "step": [1], "ops": OPS, "patience": 10.0, "run": "by_folder"}
    weights, probe = train(op_check=settings, output=tmp_path / "out")
    assert same(bare, weights)
    assert probe.findings == []
    assert re.fullmatch(rf"op_check: 1 step judged, \d+ calls \(.*\) by {re.escape(str(shared))}\.", probe.sentences[-1])
    assert json.loads((server.folder / "by_folder" / "rank0" / "op_check.json").read_text())["code"] == 0
    server.wait_for("the link to session-odd ended: no frame of this protocol begins with b'garbage'")
    assert [path.name for path in shared.iterdir()] == ["session-link"], "what was read is removed"
    assert (tmp_path / "kept").exists()


def test_a_bug_stops_the_training_where_the_plan_says_so(wrong_gelu: None, server: Serving, keys: Path, tmp_path: Path) -> None:
    server.wait_for("listening on")
    with pytest.raises(StopTraining, match=r"op_check: Functional\.gelu\.0\.forward in root is a bug"):
        train(
            op_check=to(server.port, keys / "training", stop=True), output=tmp_path, between=lambda s: time.sleep(0.2), steps=99
        )


# ---- servers that behave badly --------------------------------------------------------------------------------------


@contextlib.contextmanager
def fake(behave: Callable[[socket.socket], None], secure: ssl.SSLContext | None) -> Generator[int]:
    """A server in a thread; `behave` gets each connection. With a context it speaks TLS."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    held: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError):
                held.append(plain)
                made = plain if secure is None else secure.wrap_socket(plain, server_side=True)
                held.append(made)
                behave(made)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for each in held:
            with contextlib.suppress(OSError):
                each.close()


def silent(connection: socket.socket) -> None:
    """Half-open: it accepts and says nothing."""


def garbage(connection: socket.socket) -> None:
    connection.sendall(b"\x00garbage" * 4096)


def closes(connection: socket.socket) -> None:
    connection.close()


def welcomes(connection: socket.socket) -> None:
    """Greets, takes what comes slowly, and judges nothing."""
    greet(connection)
    with contextlib.suppress(OSError):
        while connection.recv(64):
            time.sleep(0.05)


def vanishes(connection: socket.socket) -> None:
    greet(connection)
    connection.recv(4096)
    connection.close()


def lies(connection: socket.socket) -> None:
    """Judges a call that was never sent."""
    greet(connection)
    connection.sendall(encode(WireFrame(Kind.VERDICT, {"number": 4711})))


def floods(connection: socket.socket) -> None:
    """Announces more than anybody may send."""
    connection.sendall(b"TPOC\x01\x02\x00\x00" + b"\xff" * 20)


def greet(connection: socket.socket) -> None:
    decoder = Decoder(0)
    while not list(decoder.feed(connection.recv(4096))):
        pass
    connection.sendall(encode(WireFrame(Kind.WELCOME, {"window": 1 << 20})))


@pytest.mark.parametrize(
    ("behave", "said"),
    [
        (silent, "there is no link to the reference machine: 127.0.0.1:PORT does not answer"),
        (garbage, "no frame of this protocol begins with b'\\x00garbage'"),
        (closes, "127.0.0.1:PORT closed the connection"),
        (welcomes, "the link to the reference machine broke: 127.0.0.1:PORT does not answer"),
        (vanishes, "the link to the reference machine broke: 127.0.0.1:PORT closed the connection"),
        (lies, "judged call 4711, which was not sent"),
        (floods, "a header of 4294967295 bytes is announced, at most 1048576 are read"),
    ],
)
def test_a_server_that_behaves_badly_changes_no_bit(
    behave: Callable[[socket.socket], None], said: str, bare: list[torch.Tensor], keys: Path, tmp_path: Path
) -> None:
    with fake(behave, context(keys / "server", server=True)) as port:
        settings = to(port, keys / "training", patience=0.25, wait=5.0)
        weights, probe = train(op_check=settings, output=tmp_path, between=lambda step: time.sleep(0.1))
    assert same(bare, weights)
    told = [f.message for f in probe.findings if f.rule == "op_check"]
    assert len([m for m in told if said.replace("PORT", str(port)) in m]) == 1, told
    assert [m.startswith("not all calls were judged: ") for m in told].count(True) == 1, told
    assert {f.severity for f in probe.findings} == {"warning"}
    assert "0 steps judged, 0 calls by 127.0.0.1" in probe.sentences[-1]


def test_what_a_slow_link_cannot_take_is_left_out_and_said(bare: list[torch.Tensor], keys: Path, tmp_path: Path) -> None:
    with fake(welcomes, context(keys / "server", server=True)) as port:
        settings = to(port, keys / "training", step=["all"], max_bytes=4096, patience=5, wait=0.1)
        spent: list[float] = []
        weights, probe = train(op_check=settings, output=tmp_path, between=lambda step: spent.append(time.monotonic()))
    assert same(bare, weights)
    (judging,) = (program for program in probe.programs if program.name == "op_check")
    assert judging.held.most <= 4096
    (text,) = [f.message for f in probe.findings if f.message.startswith("not all calls were judged")]
    left = re.search(r"(\d+) were left out \(\d+ because (their|its) values were not held", text)
    assert left is not None
    assert int(left[1]) > 10
    assert f"{left[1]} were left out" in probe.sentences[-1]


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ("other/server", "the certificate of 127.0.0.1:PORT is not signed by the CA in ca.pem"),
        ("late/server", "the certificate of 127.0.0.1:PORT has expired"),
        ("training", "the certificate of 127.0.0.1:PORT was made for the other side"),
        ("", "127.0.0.1:PORT does not speak TLS"),
    ],
)
def test_a_server_with_wrong_keys_is_not_told_anything(
    theirs: str, said: str, bare: list[torch.Tensor], keys: Path, tmp_path: Path
) -> None:
    secure = context(keys / theirs, server=True) if theirs else None
    with fake(garbage if secure is None else greet, secure) as port:
        weights, probe = train(op_check=to(port, keys / "training", wait=0.3), output=tmp_path)
    assert same(bare, weights)
    told = [f.message for f in probe.findings]
    assert len([m for m in told if said.replace("PORT", str(port)) in m]) == 1, told


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ("other/training", "TLS|unknown|not signed by the CA"),
        ("late/training", "refuses this side's certificate: it has expired"),
        ("server", "refuses this side's certificate: it was made for the other side"),
    ],
)
def test_a_training_with_wrong_keys_is_not_let_in(
    ours: str, said: str, bare: list[torch.Tensor], server: Serving, keys: Path, tmp_path: Path
) -> None:
    server.wait_for("listening on")
    weights, probe = train(op_check=to(server.port, keys / ours, wait=5.0), output=tmp_path)
    assert same(bare, weights)
    told = [f.message for f in probe.findings]
    assert len([m for m in told if re.search(said, m)]) == 1, told
    assert "was not let in: the certificate of the training" in server.log.read_text() or ours == "other/training"


# ---- what the server has to bear ------------------------------------------------------------------------------------


def raw(server: Serving, keys: Path) -> ssl.SSLSocket:
    made = context(keys, server=False)
    return made.wrap_socket(socket.create_connection(("127.0.0.1", server.port)), server_hostname="127.0.0.1")


def test_a_server_bears_garbage_and_half_open_connections(server: Serving, keys: Path) -> None:
    server.wait_for("listening on")
    before = resident(server.process.pid)
    held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]  # say nothing, not even TLS
    with socket.create_connection(("127.0.0.1", server.port)) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    hello = encode(WireFrame(Kind.HELLO, {"run": "odd", "rank": 0}))
    call = encode(WireFrame(Kind.CALL, {"number": 1}))
    huge = b"TPOC\x01\x04\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00\xff\xff\xff\xff" + b"\x00" * 8
    mutated = [bytes(b ^ (i == at) for i, b in enumerate(hello)) for at in range(0, len(hello), 12)]
    for data in (b"\x00" * 5000, call, huge, hello + huge, hello + hello, hello + call[:20], *mutated):
        with raw(server, keys / "training") as connection:
            connection.sendall(data)
    with raw(server, keys / "training") as connection:  # a call that says too little has a verdict: not checked
        connection.sendall(hello + call)
        decoder, found = Decoder(0), list[WireFrame]()
        while len(found) < 2:
            found += decoder.feed(connection.recv(65536))
    assert [frame.kind for frame in found] == [Kind.WELCOME, Kind.VERDICT]
    assert "what arrived of it cannot be read: a CALL frame" in found[1].header["judgements"][0]["reason"]
    _, probe = train(op_check=to(server.port, keys / "training"), output=server.folder / "after")
    assert probe.sentences[-1].startswith("op_check: 2 steps judged, ")
    assert "connection was dropped" not in server.log.read_text(), "nothing of it is a fault"
    assert resident(server.process.pid) - before < 100 << 20
    for each in held:
        each.close()


def resident(pid: int) -> int:
    """Bytes of memory of a process, 0 where the system does not tell."""
    path = Path(f"/proc/{pid}/statm")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if path.exists() else 0


def test_a_training_that_is_killed_does_not_hold_the_server(server: Serving, keys: Path) -> None:
    server.wait_for("listening on")
    code = (
        "import ssl, socket, sys, time; from pathlib import Path\n"
        "from trainprobe.op_check.online.frames import WireFrame, Kind, encode\n"
        "tls = ssl.create_default_context(cafile=sys.argv[2] + '/ca.pem')\n"
        "tls.load_cert_chain(sys.argv[2] + '/cert.pem', sys.argv[2] + '/key.pem')\n"
        "s = tls.wrap_socket(socket.create_connection(('127.0.0.1', int(sys.argv[1]))), server_hostname='127.0.0.1')\n"
        "s.sendall(encode(WireFrame(Kind.HELLO, {'run': 'killed', 'rank': 5})))\n"
        "s.recv(1); print('here', flush=True); time.sleep(99)\n"
    )
    command = [sys.executable, "-c", code, str(server.port), str(keys / "training")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.kill()
    text = server.wait_for("rank 5 of killed: 0 calls judged", 10)
    assert "the link to rank 5 of killed ended: the training closed the connection" in text
    assert json.loads((server.folder / "killed" / "rank5" / "op_check.json").read_text())["code"] == 3


def test_a_reference_that_is_killed_and_comes_back_goes_on_judging(
    bare: list[torch.Tensor], server: Serving, keys: Path, tmp_path: Path
) -> None:
    """The server that comes back judges ranks 0, 2 and 3 alone, and has a list of revoked certificates by then."""
    second: list[Serving] = []
    server.wait_for("listening on")

    def between(step: int) -> None:
        if step == 0:
            server.wait_for("rank 0 of back is here")
            server.process.send_signal(signal.SIGSTOP)  # what is sent now is not answered
        if step == 1:
            server.end(signal.SIGKILL)
            second.append(Serving(tmp_path / "second", "--tls", str(keys / "server"), "--ranks", "0,2-3", port=server.port))
        if step == 3:
            second[0].wait_for("rank 0 of back is here")

    settings = to(server.port, keys / "training", step=[0, 1, 2, 3], run="back", patience=2.0)
    try:
        certs.revoke(keys, "training")
        authority = certs._Authority()
        authority.read(keys / "ca")
        authority.issue(keys / "fresh", "training", [], 1)
        (keys / "fresh" / "ca.pem").write_bytes((keys / "ca" / "cert.pem").read_bytes())
        weights, probe = train(op_check={**settings, "tls": str(keys / "fresh")}, output=tmp_path / "out", between=between)
        assert same(bare, weights)
        told = [f.message for f in probe.findings]
        assert len([m for m in told if m.startswith("the link to the reference machine broke: ")]) == 1, told
        assert len(told) == 2, told
        assert re.search(r"not all calls were judged: \d+ were sent and never answered, the link broke 1 time", told[1])
        assert re.search(r"[234] steps judged", probe.sentences[-1])
        reported = json.loads((tmp_path / "second" / "back" / "rank0" / "op_check.json").read_text())
        assert reported["code"] == 3  # the first server took some calls with it
        assert re.search(r", \d+ more were made and did not arrive$", reported["verdict"])
        with raw(second[0], keys / "fresh") as connection:
            connection.sendall(encode(WireFrame(Kind.HELLO, {"run": "back", "rank": 1})))
            (refused,) = Decoder(0).feed(connection.recv(4096))
        assert refused.header == {"reason": "this server judges ranks 0, 2, 3 alone (its --ranks)"}
        weights, probe = train(op_check={**settings, "wait": 5.0}, output=tmp_path / "revoked")
        assert same(bare, weights)
        told = [f.message for f in probe.findings]
        assert len([m for m in told if "refuses this side's certificate: it was revoked" in m]) == 1, told
        assert second[0].end() == 3
        log = second[0].log.read_text()
        assert "was not let in: the certificate of the training was revoked" in log
        assert "back/rank0: " in log
    finally:
        for each in second:
            each.process.kill()
