"""What launcher and agent read of each other, whatever comes: a message, or one error that says why not."""

import json
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.node.end import RankEnd
from bench.node.job import NodeJob, StoreAddress
from bench.node.ranks import Answers, Failing, Left, Look
from bench.node.stacks import Doing
from bench.nodes.link import Link, LinkLostError
from bench.nodes.messages import (
    MAX_BYTES,
    Answered,
    Beat,
    Ended,
    Failed,
    Gone,
    Kept,
    Message,
    MessageError,
    Seen,
    Start,
    ToAgent,
    ToLauncher,
    decoded,
    encoded,
)
from bench.ranks.place import Place
from tests.cells import tiny_cell
from tests.fuzzing import as_line, changed_bytes, changed_json, few_and_many, fuzz

KEY = b"a test's"
JOB = NodeJob(tiny_cell(), 1, (2, 3), StoreAddress("198.18.0.1", 4000, "a run"), frozenset({"parity"}))
END = RankEnd(2, -9, {"loss": float("inf")}, None, "log", 1.5, Place("timing", "forward"), "host1")
DOING = Doing("matmul (own.py:7)", "all_reduce")
TOLD = [
    (Start(run=3, job=JOB), ToAgent),
    (Beat(), ToAgent),
    (Ended(run=3, ends=[END]), ToLauncher),
    (Kept(run=3, name="rank_2.log", content=bytes(range(256))), ToLauncher),
    (Seen(run=3, look=Look((2, 3), 17)), ToLauncher),
    (Answered(run=3, answers=Answers({2: DOING}, {3})), ToLauncher),
    (Failed(run=3, failing=Failing(2, lost_a_peer=True)), ToLauncher),
    (Gone(run=3, left=Left(2)), ToLauncher),
]


@pytest.mark.parametrize(("message", "kind"), TOLD, ids=lambda each: type(each).__name__)
def test_a_message_comes_as_it_was_sent(message, kind):
    assert decoded(encoded(message), kind) == message


SOUND = st.sampled_from([encoded(message) for message, _ in TOLD])
CONTENTS = {
    "bytes": st.binary(max_size=200),
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


def test_what_nests_too_deep_is_no_message():
    with pytest.raises(MessageError, match="RecursionError"):
        decoded(b"[" * 100_000, ToLauncher)


def linked(agent_key, talk):
    """A launcher's link to an agent that has this key and then does something; its error is the result."""
    listener = socket.create_server(("127.0.0.1", 0))

    def connect():
        connected = socket.create_connection(listener.getsockname())
        try:
            talk(Link(connected, agent_key, ToAgent, is_launcher=False).connection)
        except LinkLostError:
            connected.close()

    agent = threading.Thread(target=connect)
    agent.start()
    try:
        return Link(listener.accept()[0], KEY, ToLauncher, is_launcher=True)
    finally:
        agent.join()
        listener.close()


def test_who_has_another_key_is_not_taken_in():
    with pytest.raises(LinkLostError, match="has another ULYSSES_RING_BENCH_KEY"):
        linked(b"another", lambda _: None)


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
    link = linked(KEY, sent)
    with pytest.raises(LinkLostError, match=why):
        link.receive()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x40", b"\xff" * 64])
def test_a_stranger_is_turned_away(said, monkeypatch):
    monkeypatch.setattr("bench.nodes.link.STALLED_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stranger = socket.create_connection(listener.getsockname())
        stranger.sendall(said)
        with pytest.raises(LinkLostError, match=r"before it had shown|has another"):
            Link(listener.accept()[0], KEY, ToLauncher, is_launcher=True)
        stranger.close()
