"""The key book: the newest keys of each tenant, each once, bounded."""

from __future__ import annotations

from cachemgr.key_book import KeyBook
from cachemgr.keys import CacheKey


def key(revision):
    return CacheKey(b"weights", revision, b"", b"", b"", b"", "bfloat16", "none", 1)


def test_book_keeps_the_newest_keys_of_each_tenant():
    """Repetition moves a key to the front; the oldest goes where there are too many; tenants do not mix."""
    book = KeyBook(max_keys=2)
    assert book.last("acme") is None
    assert book.keys("acme") == []
    for revision in ("1", "2", "2", "1", "3"):
        book.note("acme", key(revision))
    book.note("blue", key("9"))
    assert book.last("acme") == key("3")
    assert book.keys("acme") == [key("3"), key("1")]
    assert book.keys("blue") == [key("9")]
    book.forget("acme")
    book.forget("acme")
    assert book.last("acme") is None
    assert book.keys("acme") == []
    assert book.last("blue") == key("9")
