"""The admin service's part for subscribers: the events of the daemon, resumable and without a gap.

Invariant: each event that is sent has the number after the one before it; a subscriber that cannot be served so is
ended with OUT_OF_RANGE, and told what is known. A reader is sent neither tokens nor names of blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from cachemgr.admin_base import AdminBase
from cachemgr.events import Event
from cachemgr.roles import is_reader
from common.errors import OutOfRange, PermissionDenied
from common.tokens import unpack_tokens
from tessera.admin.v1 import admin_pb2

POLL_SECONDS: Final = 0.02
PAGE_EVENTS: Final = 256
PUBLISHED: Final = "blocks_published"
_SCOPE_MARK: Final = "@"

# Method names are those of the RPCs.
# ruff: noqa: N802


class EventAdmin(AdminBase):
    """WatchEvents."""

    async def WatchEvents(
        self, request: admin_pb2.WatchEventsRequest, context: Any
    ) -> AsyncIterator[admin_pb2.WatchEventsResponse]:
        """First what is still known after the sequence, then what comes, until the caller goes."""
        for_reader = is_reader()
        if request.with_tokens and for_reader:
            raise PermissionDenied(
                "with_tokens: token ids are for operators; use the operator's credential (admin.key)",
                reason="OPERATOR_NEEDED",
                metadata={"field": "with_tokens"},
            )
        log = self._events
        if request.epoch and request.epoch != self._owner.epoch:
            raise OutOfRange(
                f"epoch is {request.epoch}; the daemon's is {self._owner.epoch}, and its events begin anew",
                reason="EPOCH_OVER",
                metadata={
                    "epoch": str(self._owner.epoch),
                    "oldest_sequence": str(log.oldest_sequence),
                    "last_sequence": str(log.last_sequence),
                },
            )
        after = request.after_sequence if request.HasField("after_sequence") else log.last_sequence
        log.since(after, 1)
        await context.send_initial_metadata(())  # the caller knows from here on that nothing escapes it
        while True:
            # The stream's own flow control holds this loop up where the reader is slow, until the log has gone on.
            events = log.since(after, PAGE_EVENTS)
            if not events:
                await asyncio.sleep(POLL_SECONDS)
            for sequence, event in events:
                yield self._message(sequence, event, for_reader=for_reader, with_tokens=request.with_tokens)
                after = sequence

    def _message(
        self, sequence: int, event: Event, *, for_reader: bool, with_tokens: bool
    ) -> admin_pb2.WatchEventsResponse:
        age_ns = self._clocks.steady_ns() - event.now_ns
        detail = {name: str(value) for name, value in event.detail.items()}
        manager = self._owner.manager
        tenant = event.tenant
        if event.owner and manager is not None:
            tenant = manager.owner_name(event.owner)
            if tenant.startswith(_SCOPE_MARK):
                detail["scope"], tenant = tenant.removeprefix(_SCOPE_MARK), ""
        message = admin_pb2.WatchEventsResponse(
            sequence=sequence,
            kind=event.kind,
            epoch=self._owner.epoch,
            unix_seconds=(self._clocks.wall_ns() - age_ns) / 1e9,
            tenant=tenant,
            session=event.session,
            lease=event.lease,
            blocks=event.blocks.tolist(),
            detail=detail,
        )
        if event.kind == PUBLISHED and not for_reader and manager is not None:
            published = manager.published_blocks(event)
            if published is not None:
                message.name = published.name
                if with_tokens:
                    message.token_ids.extend(unpack_tokens(published.tokens, "tokens"))
        return message
