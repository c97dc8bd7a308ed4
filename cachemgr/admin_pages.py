"""Pages of the admin service's lists: what a request asks for, and the token of the page after. Pure.

Invariant: a token says after which item a page begins, so that changes in between lose and repeat nothing else. Called
by the parts of the admin service.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from cachemgr.tenant_keys import check_name
from common.errors import InvalidArgument

DEFAULT_PAGE: Final = 100
MAX_PAGE: Final = 1000
MAX_PAGE_TOKEN: Final = 2**63 - 1
Item = TypeVar("Item")


class PageRequest(Protocol):
    """What every list request has."""

    @property
    def page_size(self) -> int: ...
    @property
    def page_token(self) -> str: ...


@dataclass(frozen=True, slots=True)
class PageAsked:
    """A page: at most `limit` items after the id `after` (0 = from the first)."""

    after: int
    limit: int


def page_asked(request: PageRequest) -> PageAsked:
    """The page of a request. Raises InvalidArgument with the field that is wrong."""
    return PageAsked(_after(request.page_token), page_limit(request))


def page_limit(request: PageRequest) -> int:
    """The page size of a request. Raises InvalidArgument."""
    size = request.page_size
    if not 0 <= size <= MAX_PAGE:
        raise InvalidArgument("page_size", f"is {size}; allowed is 1..{MAX_PAGE}, or 0 for {DEFAULT_PAGE}")
    return size or DEFAULT_PAGE


def next_token(next_after: int) -> str:
    """The token of the page after; empty where there is none."""
    return str(next_after) if next_after else ""


def named_page(
    request: PageRequest, find: Callable[[str, int], Sequence[Item]], name: Callable[[Item], str]
) -> tuple[Sequence[Item], str]:
    """(items, next token) of a list by name; `find` takes the name to begin after, and how many.

    Raises InvalidArgument.
    """
    limit = page_limit(request)
    after = check_name(request.page_token, "page_token") if request.page_token else ""
    found = find(after, limit + 1)
    return found[:limit], name(found[limit - 1]) if len(found) > limit else ""


def _after(token: str) -> int:
    if not token:
        return 0
    if not (token.isascii() and token.isdigit() and len(token) <= 19 and int(token) <= MAX_PAGE_TOKEN):
        raise InvalidArgument("page_token", "is none of ours; pass next_page_token of the page before, or nothing")
    return int(token)
