"""The same shapes as hand-written Dagster jobs, as a Dagster user writes them: values between ops, nothing of ours."""

# No `from __future__ import annotations` here: Dagster reads the annotations of ops.

import time

import dagster as dg

CHAIN_LENGTH = 20
FAN_WIDTH = 50
PAUSE_S = 0.1


@dg.op
def first() -> dict[str, int]:
    """Begins the chain."""
    return {"value": 1}


@dg.op
def hand_on(value: dict[str, int]) -> dict[str, int]:
    """Hands the value on."""
    return value


@dg.op
def pause(value: dict[str, int]) -> dict[str, int]:
    """Takes its time."""
    time.sleep(PAUSE_S)
    return value


@dg.op
def gather(values: list[dict[str, int]]) -> dict[str, int]:
    """Ends the fan."""
    return {"value": len(values)}


@dg.job(executor_def=dg.in_process_executor)
def chain_of_ops() -> None:
    """`CHAIN_LENGTH` ops, each after the other."""
    value = first()
    for number in range(1, CHAIN_LENGTH):
        value = hand_on.alias(f"hand_on_{number}")(value)


@dg.job(executor_def=dg.in_process_executor)
def fan_of_ops() -> None:
    """`FAN_WIDTH` ops beside each other, between one before and one after them."""
    value = first()
    gather([pause.alias(f"pause_{number}")(value) for number in range(FAN_WIDTH)])
