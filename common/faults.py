"""Fault knobs for tests. All are off unless `--test-faults` is given; a knob without that flag is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Faults:
    """What to break, on purpose.

    step_delay_seconds: the decoder waits this long inside every step.
    poison_on_free:     the daemon fills freed blocks with NaN.
    weak_hash_bits:     block names keep only so many bits (0 = all 128).
    fail_allocation:    the n-th allocation of the daemon fails once (0 = none).
    delay_message:      operation name -> seconds that the daemon waits before serving it.
    drop_message:       operation name -> the n-th such message is dropped.
    interpreted_kernels: the decoder runs its GPU kernels under Triton's interpreter, on the CPU (float32 alone).
    """

    step_delay_seconds: float = 0.0
    poison_on_free: bool = False
    weak_hash_bits: int = 0
    fail_allocation: int = 0
    delay_message: dict[str, float] = field(default_factory=dict)
    drop_message: dict[str, int] = field(default_factory=dict)
    interpreted_kernels: bool = False


NAMES = (
    "step_delay=<seconds>, poison_on_free=1, weak_hash=<bits>, fail_allocation=<n>, "
    "delay=<message>:<seconds>, drop=<message>:<n>, interpreted_kernels=1"
)


def parse_faults(specs: Sequence[str], *, enabled: bool) -> Faults:
    """Read `name=value` specs. Raises ValueError on an unknown knob, a bad value, or when not enabled."""
    if specs and not enabled:
        raise ValueError("--fault is refused without --test-faults")
    step_delay, poison, weak, fail = 0.0, False, 0, 0
    interpreted = False
    delays: dict[str, float] = {}
    drops: dict[str, int] = {}
    for spec in specs:
        name, _, value = spec.partition("=")
        try:
            match name:
                case "step_delay":
                    step_delay = _in_range(float(value), 0.0, 600.0)
                case "poison_on_free":
                    poison = bool(int(value))
                case "interpreted_kernels":
                    interpreted = bool(int(value))
                case "weak_hash":
                    weak = int(_in_range(int(value), 1, 128))
                case "fail_allocation":
                    fail = int(_in_range(int(value), 1, 2**31))
                case "delay":
                    message, _, seconds = value.partition(":")
                    delays[message] = _in_range(float(seconds), 0.0, 600.0)
                case "drop":
                    message, _, number = value.partition(":")
                    drops[message] = int(_in_range(int(number), 1, 2**31))
                case _:
                    raise ValueError(f"unknown knob; allowed are {NAMES}")
        except ValueError as error:
            raise ValueError(f"--fault {spec}: {error}") from None
    return Faults(step_delay, poison, weak, fail, delays, drops, interpreted)


def _in_range(value: float, low: float, high: float) -> float:
    if not low <= value <= high:
        raise ValueError(f"{value} is outside {low}..{high}")
    return value
