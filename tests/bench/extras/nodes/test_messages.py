"""What launcher and agent read of each other, whatever comes: a message, or one error that says why not."""

import json
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.extras.nodes.link import (
    MAX_BYTES,
    Answered,
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
    decoded,
    encoded,
)
from bench.ranks.log import RankStage, RankState
from bench.record.record import OutOfMemory
from bench.run.node.job import NodeJob, StoreAddress
from bench.run.node.ranks import Failing, Left, RankEnd, RankFailure
from bench.run.node.stacks import Doing
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
NEWS = [RankStage("timing", steps=3), Failing(2, lost_a_peer=True), Left(2)]
TOLD = [
    (Start(job=JOB), ToAgent),
    (Ended(ends=[END, FAILED]), ToLauncher),
    (RankFile(name="rank_2.log", content=bytes(range(256))), ToLauncher),
    (RankEvents(news=NEWS, progress=17), ToLauncher),
    (Answered(doing={2: Doing("matmul (own.py:7)", "all_reduce"), 3: Doing(is_stopped=True)}), ToLauncher),
]


@pytest.mark.parametrize(("message", "kind"), TOLD, ids=lambda each: type(each).__name__)
def test_a_message_comes_as_it_was_sent(message, kind):
    assert decoded(encoded(message), kind) == message


SOUND = st.sampled_from([encoded(message) for message, _ in TOLD])
CONTENTS = {
    "bytes": st.binary(max_size=200) | st.just(b"[" * 100_000),  # which nests too deep
    "changed bytes": SOUND.flatmap(changed_bytes),
    "changed values": SOUND.flatmap(lambda sound: changed_json(json.loads(sound))).map(as_line),
}


@few_and_many()
@pytest.mark.parametrize("content", CONTENTS)
def test_any_bytes_are_a_message_or_one_error_in_one_line(content, examples):
    @given(CONTENTS[content])
    def check(some):
        for kind in (ToAgent, ToLauncher):
            try:
                assert isinstance(decoded(some, kind), Message)
            except MessageError as error:
                assert "\n" not in str(error)  # noqa: PT017

    fuzz(examples, check)


def met(talk):
    """A launcher's link to whoever connects and then does something."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = threading.Thread(target=talk, args=(socket.create_connection(listener.getsockname()),))
        other.start()
        try:
            return MessageLink(listener.accept()[0], KEY, ToLauncher, is_launcher=True)
        finally:
            other.join()


def with_key(key, talk=lambda _: None):
    """What an agent with this key does, whose connection then does something."""

    def agent(connected):
        try:
            talk(MessageLink(connected, key, ToAgent, is_launcher=False).connection)
        except LinkLostError:
            connected.close()

    return agent


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (lambda connection: connection.send({"a": "pickle"}), "sent what is no message"),
        (lambda connection: connection.send_bytes(b"{}"), "sent what is no message"),
        (lambda connection: connection.close(), "connection closed"),
        (
            lambda connection: connection._send((MAX_BYTES + 1).to_bytes(4, "big") + b"a beginning"),
            "connection lost",
        ),
    ],
    ids=["a pickle", "no message", "the end", "more than a message may have"],
)
def test_a_link_is_lost_for_what_is_no_message(sent, why):
    link = met(with_key(KEY, sent))
    with pytest.raises(LinkLostError, match=why):
        link.receive()


STRANGERS = {
    "another key": with_key(b"another"),
    "nothing": lambda connected: None,
    "another protocol": lambda connected: connected.sendall(b"GET / HTTP/1.1\r\n\r\n"),
    "a beginning": lambda connected: connected.sendall(b"\x00\x00\x00\x40"),
    "a lot": lambda connected: connected.sendall(b"\xff" * 64),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_is_turned_away(stranger, monkeypatch):
    monkeypatch.setattr("bench.extras.nodes.link.STALLED_S", 1.0)
    with pytest.raises(LinkLostError, match=r"has another|before it had shown"):
        met(STRANGERS[stranger])
