"""Signals end a sweep once, by their own name, and never what it does last."""

import os
import signal

import pytest

from bench.run.interrupts import SIGNALS, Interrupts


@pytest.fixture(autouse=True)
def handlers():
    """Those of before, also where a test fails."""
    before = {caught: signal.getsignal(caught) for caught in SIGNALS}
    for caught in SIGNALS:
        signal.signal(caught, signal.default_int_handler)
    yield
    for caught, handler in before.items():
        signal.signal(caught, handler)


@pytest.fixture
def interrupts():
    ours = Interrupts()
    ours.install()
    return ours


def send(caught):
    os.kill(os.getpid(), caught)


@pytest.mark.parametrize(("caught", "name"), SIGNALS.items())
def test_a_signal_is_an_interruption_by_its_own_name(interrupts, capfd, caught, name):
    with pytest.raises(KeyboardInterrupt, match=f"^{name}$"):
        send(caught)
    assert Interrupts.installed() is interrupts
    print("a file or a pipe is still written to")
    assert capfd.readouterr().out


def test_repetitions_do_not_disturb_the_end_that_the_first_one_brought(interrupts):
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
    send(signal.SIGINT)
    interrupts.begin_to_close()
    send(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), interrupts.listening():
        send(signal.SIGTERM)
    send(signal.SIGINT)


def test_what_a_destructor_swallowed_is_raised_again(interrupts):
    interrupts.raise_swallowed()
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGHUP)
    with pytest.raises(KeyboardInterrupt, match="SIGHUP"):
        interrupts.raise_swallowed()


def test_where_a_shell_has_ctrl_c_ignored_sigterm_ends_a_sweep():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Interrupts().install()
    send(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        send(signal.SIGTERM)


def test_nohup_is_respected():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    Interrupts().install()
    send(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_sweep_that_nobody_installed_signals_for_leaves_them_alone():
    Interrupts().begin_to_close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
