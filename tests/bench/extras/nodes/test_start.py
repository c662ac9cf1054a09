"""Agents that cannot be started are refused in one line; a link that stalls or closes hangs no side."""

import os
import socket
import threading
import time

import pytest

from bench.config import ConfigError
from bench.extras.nodes import agent, machines, remote
from bench.extras.nodes.link import Link
from bench.extras.nodes.protocol import NodeReport, Ready, Report, Request, Start, decode, encode
from bench.ranks.log import RankStage, RankState
from bench.record.record import OutOfMemory
from bench.run.node.job import NodeJob, StoreAddress
from bench.run.node.ranks import RankEnd, RankEnded, RankFailed, RankFailure
from bench.run.node.stacks import RankActivity
from tests.support.cells import make_raw, tiny_cell
from tests.support.command import run_command_here
from tests.support.waiting import wait_until

JOB = NodeJob(tiny_cell(), (2, 3), StoreAddress("198.18.0.1", 4000, "a run"), frozenset({"parity"}))
END = RankEnd(2, -9, {"loss": float("inf")}, None, "log", 1.5, RankState("timing", "forward"), "host1")
FULL = OutOfMemory(memory="gpu", requested_bytes=8, limit_bytes=None, allocated_bytes=4, largest=[])
ERROR = RankFailure(
    phase="timing", kind="OutOfMemoryError", message="", traceback="", failed_at_s=1.5, out_of_memory=FULL
)  # fmt: skip
MESSAGES = [
    (Start(JOB), Request),
    (
        NodeReport(events=[RankStage("timing", steps=3), RankFailed(2, True), RankEnded(2)], progress=17),
        Report,
    ),
    (
        NodeReport(ends=[END, RankEnd(3, 1, None, ERROR, "log")], files={"rank_2.log": bytes(range(256))}),
        Report,
    ),
    (NodeReport(activities={2: RankActivity("matmul (own.py:7)", "all_reduce")}), Report),
]


@pytest.mark.parametrize(("message", "kind"), MESSAGES)
def test_decode_returns_the_encoded_message(message, kind):
    line = encode(message)
    assert line.count(b"\n") == 1
    assert decode(line, kind) == message


@pytest.mark.parametrize("text", [b"Welcome", b"3", b"[]", b'{"type":"Stop"}', b'{"type":"Ready"}', b"\xff"])
def test_decode_refuses_what_a_login_shell_may_print(text):
    with pytest.raises(ConfigError):
        decode(text, Report)


def pipes(silent_s):
    """Return a link, and the descriptors of its other side: one to write to and one to read from."""
    (reads, other_writes), (other_reads, writes) = os.pipe(), os.pipe()
    return Link(reads, writes, silent_s), other_writes, other_reads


def test_link_joins_the_parts_of_a_line_and_leaves_out_beats():
    link, other, _ = pipes(60)
    os.write(other, b"\n\none\ntw")
    assert (link.receive(), link.unfinished_line) == ([b"one"], b"tw")
    os.write(other, b"o\n")
    os.close(other)
    assert link.receive() == [b"two"]
    assert link.lost_reason == "connection closed"


def test_link_is_lost_if_the_other_side_is_silent_or_stalls():
    """A trace is larger than a pipe's buffer; the sender must not wait for ever when nothing reads it."""
    link, other, _ = pipes(0.3)
    time.sleep(0.2)
    os.write(other, b"\n")
    time.sleep(0.2)
    link.receive()
    assert link.lost_reason is None
    time.sleep(0.4)
    link.receive()
    assert link.lost_reason == "silent for 0.3 s"

    link, _, _ = pipes(0.3)
    started_s = time.monotonic()
    link.send(bytes(10**7))
    assert link.lost_reason == "took no data for 0.3 s"
    assert time.monotonic() - started_s < 5


def test_slow_reader_gets_a_long_line_whole():
    link, _, other = pipes(60)
    threading.Thread(target=link.send, args=(b"x" * 10**6 + b"\n",), daemon=True).start()
    content = b""
    while not content.endswith(b"\n"):
        content += os.read(other, 10**5)
        time.sleep(0.001)
    assert len(content) == 10**6 + 1


STARTS = {
    "no-such-command {host}": "node a: `no-such-command a` cannot be run: No such file or directory",
    "sh -c 'echo Permission denied. >&2; exit 255' {host}":
        "node a: `sh -c 'echo Permission denied. >&2; exit 255' a` connection closed: Permission denied.",
    "sh -c 'echo Account expired; exit 1' {host}": "connection closed: Account expired",
    "sh -c 'echo no python >&2; echo srun: error: exit 127 >&2' {host}": "connection closed: no python",
    "sh -c 'echo no key >&2; echo Connection to a closed. >&2; exit 1' {host}": "connection closed: no key",
    "sh -c '' {host}": "`sh -c '' a` connection closed",
    "sh -c 'printf Password:\\ ; sleep 60' {host}": "silent for 1 s: Password:",
    "ssh a": "cluster.start=ssh a: must contain {host}; write for example `ssh {host}`",
    "ssh 'a {host}": "cluster.start=ssh 'a {host}: No closing quotation; quote it as in a shell",
}  # fmt: skip


@pytest.mark.parametrize("start", STARTS)
def test_command_that_starts_no_agent_is_refused_in_one_line(start, monkeypatch):
    monkeypatch.setattr(remote, "START_S", 1.0)
    with pytest.raises(ConfigError) as error:
        wait_for_agent(start)
    assert STARTS[start] in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def wait_for_agent(start):
    cluster = {**make_raw("cluster=nodes")["cluster"], "start": start}
    node = remote.RemoteNode("a", *machines._command(cluster, "a", []), os.environ)
    try:
        machines._wait_until_ready([node], print)
    finally:
        node.end(0)


PRINTED = {
    b"srun: warning: a step\n": None,
    b'{"type": "info", "text": "a log of JSON lines"}\n': None,
    b'{"type": "NodeReport", "ev\x1b[0m\nents": []}\nrest': '{"type": "NodeReport", "ev\\x1b[0m',
    b'50 %{"type": "NodeReport", "events": []}\n': None,
    b'50 %{"type": "NodeReport", "eve\n': '{"type": "NodeReport", "eve',
    b'ogress": null, "ends": null, "files": {}}\n': 'ogress": null, "ends": null, "files": {}}',
    b'{"type": "Stop"}\r\n': '{"type": "Stop"}\\r',
    b'{"type": "NodeReport", "events": [' + b"1, " * 1365 + b"\n":
        '{"type": "NodeReport", "events": [' + "1, " * 8 + "1,",
}  # fmt: skip


@pytest.mark.parametrize("printed", PRINTED)
def test_message_that_arrives_damaged_ends_the_node_at_once(printed, tmp_path):
    (tmp_path / "lines").write_bytes(encode(Ready(("10.0.0.1", 1), {})) + printed)
    node = remote.RemoteNode(
        "a", ("sh", "-c", f"cat {tmp_path}/lines; echo done >&2; sleep 60"), [], os.environ
    )
    try:
        wait_until(lambda: node.last_line() == "done", 5)
        node.receive()
        beginning = PRINTED[printed]
        if beginning is None:
            assert node.lost_reason is None
        else:
            assert str(node.lost_reason).startswith("passed on a damaged line (a program wrote into it, or")
            assert str(node.lost_reason).endswith(f"): '{beginning}'")
    finally:
        node.end(0)


def test_words_are_quoted_for_ssh_alone():
    commands = [
        machines._command({"start": f"{word} {{host}}"}, "a", ["x y"]) for word in ("/bin/ssh", "env")
    ]
    assert commands == [(["/bin/ssh", "a"], ["'x y'"]), (["env", "a"], ["x y"])]


def test_node_with_another_version_is_refused(tmp_path):
    environment = {"packages": {"torch": "1.0"}, "python": "3.0"}
    (tmp_path / "ready").write_bytes(encode(Ready(("10.0.0.1", 1), environment)))
    with pytest.raises(ConfigError, match=r"node a: python is 3\.0, but 3\.\S+ on this machine"):
        wait_for_agent(f"sh -c 'cat {tmp_path}/ready; sleep 60' {{host}}")


def test_own_address_is_the_loopback_only_if_asked_for(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert agent.own_address("lo", "") == ("127.0.0.1", "lo")
    for interface in ("auto", "no0"):
        with pytest.raises(ConfigError, match=rf"cluster\.interface={interface}: .* write one of .*lo"):
            agent.own_address(interface, "localhost")


HOSTS = {
    "cluster.nodes=auto": "cluster.hosts=null: must name machines; write for example cluster.hosts=a,b",
    "cluster.hosts=a,b,a": "cluster.hosts=a,b,a: a occurs twice; write for example cluster.hosts=a,b",
    "cluster.hosts=-oProxyCommand=x": "cluster.hosts=-oProxyCommand=x: must name machines",
    "cluster.hosts=a,": "cluster.hosts=a,: must name machines",
    "cluster.hosts=a cluster.nodes=2": "cluster.nodes=2: cluster.hosts names 1; write cluster.nodes=1",
    "cluster.nodes=2": "cluster.hosts=null: must name machines",
    "cluster.interface=eth0,eth1": "one value applies to the whole sweep",
    "hosts=a,b": "hosts: no such key; did you mean cluster.hosts?",
    "cluster=auto cluster.hosts=a,b": "needs an explicit cluster, as in cluster=nodes cluster.hosts=...",
}


@pytest.mark.parametrize("words", HOSTS)
def test_hosts_that_cannot_be_used_are_refused_in_one_line(words, tmp_path):
    done = run_command_here(
        tmp_path, "-m", "cluster=nodes", *words.split(), "seq_len=256", "cluster.world_size=4"
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert HOSTS[words] in line
