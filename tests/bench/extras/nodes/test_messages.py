"""Launcher and agent decode any bytes as a message or raise one error that says why not."""

import json
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.extras.nodes.link import (
    MAX_BYTES,
    ActivityReport,
    Ended,
    LinkLostError,
    Message,
    MessageError,
    MessageLink,
    RankEvents,
    RankFile,
    Start,
    ToAgent,
    ToLauncher,
    decode,
    encode,
)
from bench.ranks.log import RankStage, RankState
from bench.record.record import OutOfMemory
from bench.run.node.job import NodeJob, StoreAddress
from bench.run.node.ranks import RankEnd, RankEnded, RankFailed, RankFailure
from bench.run.node.stacks import RankActivity
from tests.support.cells import tiny_cell
from tests.support.fuzzing import as_line, changed_bytes, changed_json, few_and_many, fuzz

KEY = b"a test's"
JOB = NodeJob(tiny_cell(), (2, 3), StoreAddress("198.18.0.1", 4000, "a run"), frozenset({"parity"}))
END = RankEnd(2, -9, {"loss": float("inf")}, None, "log", 1.5, RankState("timing", "forward"), "host1")
FULL = OutOfMemory(memory="gpu", requested_bytes=8, limit_bytes=None, allocated_bytes=4, largest=[])
ERROR = RankFailure(
    phase="timing",
    kind="OutOfMemoryError",
    message="no room",
    traceback="",
    failed_at_s=1.5,
    out_of_memory=FULL,
)
FAILED = RankEnd(3, 1, None, ERROR, "log")
EVENTS = [RankStage("timing", steps=3), RankFailed(2, lost_peer=True), RankEnded(2)]
MESSAGES = [
    (Start(job=JOB), ToAgent),
    (Ended(ends=[END, FAILED]), ToLauncher),
    (RankFile(name="rank_2.log", content=bytes(range(256))), ToLauncher),
    (RankEvents(events=EVENTS, progress=17), ToLauncher),
    (
        ActivityReport(
            activities={
                2: RankActivity("matmul (own.py:7)", "all_reduce"),
                3: RankActivity(is_stopped=True),
            }
        ),
        ToLauncher,
    ),
]


@pytest.mark.parametrize(("message", "kind"), MESSAGES, ids=lambda value: type(value).__name__)
def test_decode_returns_the_encoded_message(message, kind):
    assert decode(encode(message), kind) == message


SOUND = st.sampled_from([encode(message) for message, _ in MESSAGES])
CONTENTS = {
    "bytes": st.binary(max_size=200) | st.just(b"[" * 100_000),  # nests too deep
    "changed bytes": SOUND.flatmap(changed_bytes),
    "changed values": SOUND.flatmap(lambda sound: changed_json(json.loads(sound))).map(as_line),
}


@few_and_many()
@pytest.mark.parametrize("content", CONTENTS)
def test_decode_returns_a_message_or_raises_a_one_line_error(content, examples):
    @given(CONTENTS[content])
    def check(some):
        for kind in (ToAgent, ToLauncher):
            try:
                assert isinstance(decode(some, kind), Message)
            except MessageError as error:
                assert "\n" not in str(error)  # noqa: PT017

    fuzz(examples, check)


def link_to(talk):
    """Return a launcher's link to an agent, which calls `talk` with its connected socket."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = threading.Thread(target=talk, args=(socket.create_connection(listener.getsockname()),))
        other.start()
        try:
            return MessageLink(listener.accept()[0], KEY, ToLauncher, is_launcher=True)
        finally:
            other.join()


def with_key(key, talk=lambda _: None):
    """Return an agent that authenticates with this key and then calls `talk` with its connection."""

    def agent(connected):
        try:
            talk(MessageLink(connected, key, ToAgent, is_launcher=False).connection)
        except LinkLostError:
            connected.close()

    return agent


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda connection: connection.send({"a": "pickle"}), "sent an invalid message"),
        (lambda connection: connection.send_bytes(b"{}"), "sent an invalid message"),
        (lambda connection: connection.close(), "connection closed"),
        (
            lambda connection: connection._send((MAX_BYTES + 1).to_bytes(4, "big") + b"a beginning"),
            "connection lost",
        ),
    ],
    ids=["a pickle", "no message", "a close", "too large"],
)
def test_receive_raises_link_lost_error_for_invalid_bytes(act, reason):
    link = link_to(with_key(KEY, act))
    with pytest.raises(LinkLostError, match=reason):
        link.receive()


STRANGERS = {
    "another key": with_key(b"another"),
    "nothing": lambda connected: None,
    "another protocol": lambda connected: connected.sendall(b"GET / HTTP/1.1\r\n\r\n"),
    "a beginning": lambda connected: connected.sendall(b"\x00\x00\x00\x40"),
    "a lot": lambda connected: connected.sendall(b"\xff" * 64),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_link_refuses_a_stranger(stranger, monkeypatch):
    monkeypatch.setattr("bench.extras.nodes.link.STALLED_S", 1.0)
    with pytest.raises(LinkLostError, match=r"has another|before it had proved"):
        link_to(STRANGERS[stranger])
