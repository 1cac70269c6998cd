"""The process's event loop, as step threads see it."""

import asyncio
import concurrent.futures
import contextvars
import os
import subprocess
import sys
import threading

import pytest

from agentmesh_dagster.runtime.loop import CoroutineCanceled, cancel_running, run_on_loop

WHO = contextvars.ContextVar("who")


async def current_loop():
    return asyncio.get_running_loop()


def test_every_thread_shares_one_loop_and_keeps_its_own_context():
    async def who():
        await asyncio.sleep(0)
        return WHO.get(), asyncio.get_running_loop()

    def ask(name):
        WHO.set(name)
        return run_on_loop(who())

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(ask, "abcd"))
    assert [name for name, _ in answers] == ["a", "b", "c", "d"]
    assert {loop for _, loop in answers} == {run_on_loop(current_loop())}


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_what_a_coroutine_raises_reaches_the_caller_and_the_loop_lives_on(error):
    async def fail():
        raise error

    with pytest.raises(type(error)) as raised:
        run_on_loop(fail())
    assert raised.value is error
    assert run_on_loop(current_loop()).is_running()


def test_a_coroutine_that_cancels_itself_is_an_error_and_no_interrupt():
    async def give_up():
        raise asyncio.CancelledError

    with pytest.raises(concurrent.futures.CancelledError):
        run_on_loop(give_up())


def test_waiting_on_the_loop_itself_is_refused():
    async def wait_inside():
        run_on_loop(current_loop())

    with pytest.raises(RuntimeError, match="await the coroutine instead"):
        run_on_loop(wait_inside())


def test_cancel_running_lets_each_cleanup_end_however_often_it_is_called():
    started, release = threading.Event(), threading.Event()
    seen = []

    async def work():
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.to_thread(release.wait, 10)
            seen.append("cleaned up")

    def run():
        try:
            run_on_loop(work())
        except CoroutineCanceled:
            seen.append("interrupted")

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(10)
    assert cancel_running(0) == 1
    assert cancel_running(0.05) == 1
    release.set()
    assert cancel_running(10) == 0
    thread.join(10)
    assert seen == ["cleaned up", "interrupted"]
    assert cancel_running(0) == 0


def test_a_signal_in_the_main_thread_cancels_the_coroutine_and_awaits_its_cleanup():
    program = """
import asyncio, os, signal
from agentmesh_dagster.runtime.loop import run_on_loop

# A shell starts background jobs with this signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

async def work():
    asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGINT)
    try:
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0.1)
        print("cleaned up", flush=True)

try:
    run_on_loop(work())
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert done.stdout.split("\n")[:2] == ["cleaned up", "interrupted"], done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_makes_a_loop_of_its_own():
    program = """
import asyncio, os
from agentmesh_dagster.runtime.loop import run_on_loop

async def answer():
    await asyncio.sleep(0)
    return 42

run_on_loop(answer())
child = os.fork()
if child == 0:
    os._exit(run_on_loop(answer()))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "42", done.stderr
