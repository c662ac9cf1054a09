"""A signal interrupts a sweep once, under its own name, and does not interrupt its close."""

import os
import signal

import pytest

from bench.run.interrupts import SIGNALS, Interrupts


@pytest.fixture(autouse=True)
def handlers():
    """Restore the signal handlers, also if a test fails."""
    before = {caught: signal.getsignal(caught) for caught in SIGNALS}
    for caught in SIGNALS:
        signal.signal(caught, signal.default_int_handler)
    yield
    for caught, handler in before.items():
        signal.signal(caught, handler)


@pytest.fixture
def interrupts():
    handler = Interrupts()
    handler.install()
    return handler


def send(caught):
    os.kill(os.getpid(), caught)


@pytest.mark.parametrize(("caught", "name"), SIGNALS.items())
def test_a_signal_raises_keyboard_interrupt_with_its_name(interrupts, capfd, caught, name):
    with pytest.raises(KeyboardInterrupt, match=f"^{name}$"):
        send(caught)
    assert Interrupts.current() is interrupts
    print("a file or a pipe is still written to")
    assert capfd.readouterr().out


def test_repeated_signals_do_not_interrupt_the_close(interrupts):
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
    send(signal.SIGINT)
    interrupts.ignore_signals()
    send(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), interrupts.listening():
        send(signal.SIGTERM)
    send(signal.SIGINT)


def test_raise_swallowed_raises_a_lost_interrupt_again(interrupts):
    interrupts.raise_swallowed()
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGHUP)
    with pytest.raises(KeyboardInterrupt, match="SIGHUP"):
        interrupts.raise_swallowed()


def test_ignored_sigint_stays_ignored_and_sigterm_interrupts():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Interrupts().install()
    send(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        send(signal.SIGTERM)


def test_ignored_sighup_stays_ignored_as_under_nohup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    Interrupts().install()
    send(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_ignore_signals_leaves_uninstalled_signals_alone():
    Interrupts().ignore_signals()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
