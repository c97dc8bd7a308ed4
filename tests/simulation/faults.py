"""What goes wrong: one fault at a time, at random moments, of the kinds that the seed allows; and how it all heals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation import scenario as kinds
from tests.simulation.kernel import MILLISECOND

if TYPE_CHECKING:
    from tests.simulation.decoder import SimDecoder
    from tests.simulation.world import World


def strike(world: World) -> None:
    """One fault now, and the next one later, until faults stop."""
    kernel, scenario = world.kernel, world.scenario
    if kernel.now >= scenario.faults_until:
        return
    kernel.after(kernel.between(1, 2 * scenario.fault_every), strike, world)
    if world.workload.kept and kernel.chance(0.3) and not world.daemon.is_dead:
        world.daemon.converse(kernel.random.choice(world.workload.kept))
    allowed = [kind for kind in kinds.KINDS if kind in scenario.faults]
    if not allowed:
        return
    kind = kernel.random.choice(allowed)
    decoder = kernel.random.choice(world.decoders)
    if kind == kinds.DAEMON:
        if world.daemon.is_dead or kernel.chance(0.5):
            world.kill_daemon()
        else:
            world.tear_daemon()
    elif world.daemon.is_dead:
        return
    elif kind == kinds.OPERATOR:
        world.daemon.operate()
    elif kind == kinds.CANCEL:
        _cancel(world)
    elif decoder.alive:
        _strike_decoder(world, decoder, kind)


def _strike_decoder(world: World, decoder: SimDecoder, kind: str) -> None:
    kernel, link = world.kernel, decoder.link
    if kind == kinds.CRASH:
        lost = decoder.crash()
        kernel.after(kernel.between(0, 15 * MILLISECOND), _restart, decoder)
        for request in lost:
            kernel.after(kernel.between(100, 3000), world.submit, request)
    elif kind == kinds.STOP:
        if not decoder.stopped:
            decoder.stop()
            kernel.after(kernel.between(MILLISECOND, 45 * MILLISECOND), _go_on, decoder, decoder.life)
    elif kind == kinds.LIE:
        _lie(world, decoder)
    elif link is not None:
        if kind == kinds.PARTITION:
            kernel.say(f"network holds {decoder.name} off")
            link.hold(kernel.between(MILLISECOND, 45 * MILLISECOND))
            decoder.apart_until = link.held_until
        elif kind == kinds.DELAY:
            link.hold(kernel.between(100, 4 * MILLISECOND))
        elif kind in (kinds.DROP, kinds.REORDER):
            kernel.say(f"network breaks the stream of {decoder.name}")
            link.cut()


def _restart(decoder: SimDecoder) -> None:
    if not decoder.alive:
        decoder.start()


def _go_on(decoder: SimDecoder, life: int) -> None:
    if decoder.life == life and decoder.stopped:
        decoder.go_on()


def _cancel(world: World) -> None:
    if world.open_requests:
        request = world.kernel.random.choice(world.open_requests)
        if request.decoder is not None:
            world.kernel.say(f"client cancels r{request.number}")
            request.decoder.receive(None, ("cancel", request))


def _lie(world: World, decoder: SimDecoder) -> None:
    ready = [item for item in decoder.engine.running if item.lease is not None and not item.to_fork]
    if ready:
        sequence = world.kernel.random.choice(ready)
        sequence.lie = True
        world.lies.add((decoder.epoch, sequence.lease))  # type: ignore[arg-type]


def heal(world: World) -> None:
    """Everything that was broken works again; what the clients want stays."""
    world.start_daemon()
    world.tear_no_more()
    for decoder in world.decoders:
        if not decoder.alive:
            decoder.start()
        if decoder.stopped:
            decoder.go_on()
        decoder.apart_until = 0
        if decoder.link is not None:
            decoder.link.held_until = 0
