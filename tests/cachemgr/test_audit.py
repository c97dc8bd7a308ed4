"""The audit log: whole lines, private, bounded, without secrets and tokens; a full disk stops nobody."""

from __future__ import annotations

import json
import os
import stat

import pytest

from cachemgr.audit import OLD_FILES, UNKNOWN_PER_SECOND, AuditLog
from cachemgr.audit_calls import shown_answer, shown_fields
from tessera.admin.v1 import admin_pb2
from tests.cachemgr.admin_rig import INVALID, MISSING, audit_lines, refused, run

SECOND = 1_000_000_000


class Clock:
    """A wall clock that tests move."""

    def __init__(self):
        self.now = 1_700_000_000 * SECOND

    def __call__(self):
        return self.now


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_line_says_who_what_when_and_how_it_ended(tmp_path):
    """All parts are there, the time in UTC."""
    log = AuditLog(tmp_path / "audit.log", wall_ns=Clock())
    log.record("operator", "CreateTenant", {"tenant": "acme"}, "OK", {"num_tokens": 3}, "unix:")
    log.record("reader", "DeleteTenant", {}, "PERMISSION_DENIED", {})
    assert lines_of(tmp_path / "audit.log") == [
        {
            "time": "2023-11-14T22:13:20.000Z",
            "who": "operator",
            "method": "CreateTenant",
            "fields": {"tenant": "acme"},
            "outcome": "OK",
            "result": {"num_tokens": 3},
            "peer": "unix:",
        },
        {
            "time": "2023-11-14T22:13:20.000Z",
            "who": "reader",
            "method": "DeleteTenant",
            "fields": {},
            "outcome": "PERMISSION_DENIED",
        },
    ]
    log.close()
    log.close()


def test_files_are_private_and_a_wider_mode_is_taken_back(tmp_path):
    """0600 from the first byte, also where the file was there with another mode."""
    path = tmp_path / "audit.log"
    log = AuditLog(path)
    log.record("operator", "A", {}, "OK", {})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    log.close()
    path.chmod(0o644)
    AuditLog(path).record("operator", "B", {}, "OK", {})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [line["method"] for line in lines_of(path)] == ["A", "B"]


def test_size_is_bounded_by_rotation(tmp_path):
    """However much is written, there are at most four files of the size; the newest lines are kept, in order, whole."""
    path = tmp_path / "audit.log"
    log = AuditLog(path, max_file_bytes=500)
    for number in range(100):
        log.record("operator", f"M{number:03d}", {}, "OK", {})
    files = [path.with_name(f"audit.log.{number}") for number in range(OLD_FILES, 0, -1)] + [path]
    assert sorted(item.name for item in tmp_path.iterdir()) == sorted(item.name for item in files)
    assert all(item.stat().st_size <= 500 for item in files)
    assert all(stat.S_IMODE(item.stat().st_mode) == 0o600 for item in files)
    kept = [line["method"] for item in files for line in lines_of(item)]
    assert kept == [f"M{number:03d}" for number in range(100 - len(kept), 100)]
    assert len(kept) >= 12


def test_disk_that_takes_no_line_stops_nobody(tmp_path, capsys):
    """A failing write is logged by its method and forgotten; when there is room again, lines are written again."""
    path = tmp_path / "audit.log"
    path.mkdir()
    log = AuditLog(path)
    log.record("operator", "CreateTenant", {"tenant": "acme"}, "OK", {})
    captured = capsys.readouterr()
    assert "audit_write_failed" in captured.err + captured.out
    assert "CreateTenant" in captured.err + captured.out
    path.rmdir()
    log.record("operator", "DeleteTenant", {}, "OK", {})
    assert [line["method"] for line in lines_of(path)] == ["DeleteTenant"]


def test_line_that_was_cut_off_spoils_no_other(tmp_path, monkeypatch):
    """After a short write the next line begins on a line of its own."""
    path = tmp_path / "audit.log"
    log = AuditLog(path)
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr("cachemgr.audit.os.write", lambda fd, data: real(fd, data[:10]))
        log.record("operator", "A", {}, "OK", {})
    log.record("operator", "B", {}, "OK", {})
    torn, whole = path.read_text().splitlines()
    assert len(torn) == 10
    assert json.loads(whole)["method"] == "B"


def test_line_that_a_daemon_before_left_unfinished_spoils_no_other(tmp_path):
    """A new log on the file begins on a line of its own; after a whole line, or none, it adds no empty one."""
    path = tmp_path / "audit.log"
    path.write_text('{"time":"20')
    path.chmod(0o600)
    for method in "AB":
        AuditLog(path).record("operator", method, {}, "OK", {})
    torn, *whole = path.read_text().splitlines()
    assert torn == '{"time":"20' and [json.loads(line)["method"] for line in whole] == ["A", "B"]
    AuditLog(tmp_path / "fresh").record("operator", "C", {}, "OK", {})
    assert len((tmp_path / "fresh").read_text().splitlines()) == 1


def test_callers_without_a_credential_cannot_flood_it(tmp_path):
    """So many a second are written, the others are counted in the next line."""
    clock = Clock()
    log = AuditLog(tmp_path / "audit.log", wall_ns=clock)
    for _ in range(UNKNOWN_PER_SECOND + 7):
        log.record("unknown", "CreateTenant", {}, "UNAUTHENTICATED", {})
    log.record("operator", "CreateTenant", {}, "OK", {})
    clock.now += SECOND
    log.record("unknown", "CreateTenant", {}, "UNAUTHENTICATED", {})
    lines = lines_of(tmp_path / "audit.log")
    assert len(lines) == UNKNOWN_PER_SECOND + 2
    assert [line.get("suppressed") for line in lines[-3:]] == [None, 7, None]


KEY_TEXT = f"tsr_{'0a' * 8}_{'x' * 43}"
SHOWN = f"tsr_{'0a' * 8}_…"


@pytest.mark.parametrize(
    ("request_message", "fields"),
    [
        (admin_pb2.ApprovePrefixRequest(name="system", token_ids=[7, 8, 9]), {"name": "system", "num_token_ids": 3}),
        (admin_pb2.UpdateTenantRequest(tenant="acme", weight=float("nan")), {"tenant": "acme", "weight": "nan"}),
        (admin_pb2.CreateGroupRequest(group="g", tenants=["a", "b"]), {"group": "g", "tenants": ["a", "b"]}),
        (admin_pb2.AbortRequestRequest(request_id="x" * 1000), {"request_id": "x" * 128}),
        (admin_pb2.RevokeKeyRequest(key_id=KEY_TEXT), {"key_id": SHOWN}),
        (admin_pb2.CreateGroupRequest(group="g", tenants=[f"a {KEY_TEXT}"]), {"group": "g", "tenants": [f"a {SHOWN}"]}),
        (admin_pb2.CreateKeyRequest(tenant="tsr_acme"), {"tenant": "tsr_acme"}),
        (admin_pb2.EvictBlocksRequest(), {}),
    ],
)
def test_fields_that_are_written_hold_no_tokens_and_are_short(request_message, fields):
    """Token ids become their number, long texts are cut, and of a key that was sent as a name its id is left."""
    assert shown_fields(request_message) == fields


def test_cache_key_of_a_request_and_secret_of_an_answer_are_not_written():
    """A message is only said to be set; of an answer the named fields alone are written."""
    request = admin_pb2.PinPrefixRequest(tenant="acme", token_ids=[1])
    request.key.weights_digest = b"digest"
    assert shown_fields(request) == {"tenant": "acme", "num_token_ids": 1, "key": "set"}
    assert shown_answer(admin_pb2.CreateKeyResponse(key_id="k1", key="tsr_secret")) == {"key_id": "k1"}


def test_daemon_writes_each_change_with_its_end():
    """Good calls, refused fields and unknown names are all there, and the key's text is not."""

    async def body(rig):
        await rig.admin.CreateTenant(admin_pb2.CreateTenantRequest(tenant="acme"))
        made = await rig.admin.CreateKey(admin_pb2.CreateKeyRequest(tenant="acme", name="ci"))
        await refused(rig.admin.CreateTenant(admin_pb2.CreateTenantRequest(tenant="No Name")), INVALID)
        unknown = await refused(rig.admin.RevokeKey(admin_pb2.RevokeKeyRequest(key_id="none")), MISSING)
        assert unknown.reason == "KEY_NOT_FOUND"
        whole = await refused(rig.admin.RevokeKey(admin_pb2.RevokeKeyRequest(key_id=made.key)), INVALID)
        assert whole.message == f"key_id: is a whole key; its id is {made.key_id}"
        await rig.admin.GetSnapshot(admin_pb2.GetSnapshotRequest())
        await refused(rig.admin.ListBlocks(admin_pb2.ListBlocksRequest(page_size=-1)), INVALID)
        operator = await rig.channel(rig.paths.admin_socket, rig.paths.admin_key.read_text().strip())
        await refused(operator.unary_unary("/tessera.admin.v1.AdminService/DeleteTenant")(b"\xff"), INVALID)
        lines = audit_lines(rig)
        assert [(line["who"], line["method"], line["outcome"]) for line in lines] == [
            ("operator", "CreateTenant", "OK"),
            ("operator", "CreateKey", "OK"),
            ("operator", "CreateTenant", "INVALID_ARGUMENT"),
            ("operator", "RevokeKey", "NOT_FOUND"),
            ("operator", "RevokeKey", "INVALID_ARGUMENT"),
            ("operator", "DeleteTenant", "INVALID_ARGUMENT"),
        ]
        assert lines[1]["fields"] == {"tenant": "acme", "name": "ci"}
        assert lines[1]["result"] == {"key_id": made.key_id}
        text = rig.paths.audit_log.read_text()
        assert made.key not in text
        assert made.key.rsplit("_", 1)[1] not in text

    run(body)


def test_daemon_serves_without_an_audit_log():
    """Where the file cannot be written, calls are served all the same."""

    async def body(rig):
        rig.paths.audit_log.mkdir()
        await rig.admin.CreateTenant(admin_pb2.CreateTenantRequest(tenant="acme"))
        assert len((await rig.admin.ListTenants(admin_pb2.ListTenantsRequest())).tenants) == 2

    run(body)
