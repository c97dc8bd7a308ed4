"""The contract: generated code is what the protos give, everything is documented, and names follow the rules."""

from __future__ import annotations

import importlib.util
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parent.parent
FILE = descriptor_pb2.FileDescriptorProto.DESCRIPTOR.fields_by_name
MESSAGE = descriptor_pb2.DescriptorProto.DESCRIPTOR.fields_by_name
SNAKE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
PASCAL = re.compile(r"([A-Z][a-z0-9]*)+")


def load_generator() -> ModuleType:
    """`protos/generate.py` as a module."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "protos" / "generate.py")
    if spec is None or spec.loader is None:
        raise AssertionError("protos/generate.py is not there")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_protos(folder: Path) -> list[descriptor_pb2.FileDescriptorProto]:
    """Descriptors of our protos, with the comments of their source."""
    from importlib import resources

    from grpc_tools import protoc

    output = folder / "set.bin"
    sources = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.proto"))
    well_known = resources.files("grpc_tools") / "_proto"
    flags = ["--include_source_info", f"--descriptor_set_out={output}", f"-I{folder}", f"-I{well_known}"]
    if protoc.main(["protoc", *flags, *sources]) != 0:
        raise AssertionError("protoc failed")
    return list(descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes()).file)


def uncommented(file: descriptor_pb2.FileDescriptorProto) -> list[str]:
    """Names of services, methods, messages, fields and enum values without a comment above them."""
    comments = {tuple(place.path): place.leading_comments for place in file.source_code_info.location}
    return [name for name, path in declared(file) if not comments.get(path, "").strip()]


def declared(file: descriptor_pb2.FileDescriptorProto) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and source path of everything that a file declares."""
    for number, service in enumerate(file.service):
        path: tuple[int, ...] = (FILE["service"].number, number)
        yield service.name, path
        for index, method in enumerate(service.method):
            yield f"{service.name}.{method.name}", (*path, 2, index)
    for number, message in enumerate(file.message_type):
        yield from declared_in_message(message, message.name, (FILE["message_type"].number, number))
    for number, enum in enumerate(file.enum_type):
        yield from declared_in_enum(enum, enum.name, (FILE["enum_type"].number, number))


def declared_in_message(
    message: descriptor_pb2.DescriptorProto, name: str, path: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The same for one message and what is nested in it; entries of maps are the compiler's own."""
    yield name, path
    for index, field in enumerate(message.field):
        yield f"{name}.{field.name}", (*path, MESSAGE["field"].number, index)
    for index, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield from declared_in_message(
                nested, f"{name}.{nested.name}", (*path, MESSAGE["nested_type"].number, index)
            )
    for index, enum in enumerate(message.enum_type):
        yield from declared_in_enum(enum, f"{name}.{enum.name}", (*path, MESSAGE["enum_type"].number, index))


def declared_in_enum(
    enum: descriptor_pb2.EnumDescriptorProto, name: str, path: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The same for one enum."""
    yield name, path
    for index, value in enumerate(enum.value):
        yield f"{name}.{value.name}", (*path, 2, index)


def naming_faults(files: list[descriptor_pb2.FileDescriptorProto]) -> list[str]:
    """What breaks the rules of names: of packages, messages, fields, enums, and of requests and responses."""
    faults, uses = [], list[str]()
    for file in files:
        if re.fullmatch(r"tessera\.[a-z]+\.v\d+", file.package) is None:
            faults.append(f"package {file.package}")
        if Path(file.name).parent.as_posix() != file.package.replace(".", "/"):
            faults.append(f"folder of {file.name}")
        for message in file.message_type:
            faults += [] if PASCAL.fullmatch(message.name) else [f"message {message.name}"]
            faults += [f"{message.name}.{f.name}" for f in message.field if not SNAKE.fullmatch(f.name)]
        for enum in file.enum_type:
            prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper() + "_"
            faults += [value.name for value in enum.value if not value.name.startswith(prefix)]
            faults += [] if enum.value[0].name == f"{prefix}UNSPECIFIED" else [f"zero of {enum.name}"]
        for service in file.service:
            faults += [] if service.name.endswith("Service") else [f"service {service.name}"]
            for method in service.method:
                for kind, suffix in ((method.input_type, "Request"), (method.output_type, "Response")):
                    uses.append(kind)
                    allowed = {f"{method.name}{suffix}", f"{service.name}{method.name}{suffix}"}
                    faults += [] if kind.rpartition(".")[2] in allowed else [f"{method.name}: {kind}"]
    return faults + [f"used by several methods: {kind}" for kind in set(uses) if uses.count(kind) > 1]


def test_generated_code_is_what_the_protos_give() -> None:
    """`tessera/` is exactly what `python protos/generate.py` writes."""
    assert load_generator().drift() == []


def test_everything_in_the_contract_is_documented() -> None:
    """Every service, method, message, field and enum value has a comment."""
    with tempfile.TemporaryDirectory() as folder:
        files = compile_protos(copy_protos(Path(folder)))
    assert len(files) == 5
    assert [name for file in files for name in uncommented(file)] == []


def test_names_follow_the_rules_of_buf() -> None:
    """The rules of buf's STANDARD set that names break most often hold, wherever buf itself is not installed."""
    with tempfile.TemporaryDirectory() as folder:
        files = compile_protos(copy_protos(Path(folder)))
    assert naming_faults(files) == []


def test_the_checks_of_the_contract_notice_faults(tmp_path: Path) -> None:
    """Positive control: a missing comment, bad names and a shared request are all found."""
    source = """
    syntax = "proto3";
    package tessera.bad.v1;
    service Things { rpc Get(Shared) returns (GetResponse); rpc Put(Shared) returns (PutResponse); }
    // Shared is.
    message Shared { int32 BadName = 1; }
    message GetResponse {}
    message PutResponse {}
    enum Colour { RED = 0; }
    """
    target = tmp_path / "tessera" / "bad" / "v1" / "bad.proto"
    target.parent.mkdir(parents=True)
    target.write_text(source, encoding="utf-8")
    (file,) = compile_protos(tmp_path)
    assert set(uncommented(file)) >= {"Things", "Things.Get", "Shared.BadName", "GetResponse", "Colour.RED"}
    assert "Shared" not in uncommented(file)
    faults = " ".join(naming_faults([file]))
    for expected in (
        "service Things",
        "Shared.BadName",
        "Get: .tessera.bad.v1.Shared",
        "RED",
        "zero of Colour",
        "several",
    ):
        assert expected in faults


def copy_protos(folder: Path) -> Path:
    """Our protos below `folder`, so that the compiler writes nothing into the tree."""
    for path in (ROOT / "protos").rglob("*.proto"):
        target = folder / path.relative_to(ROOT / "protos")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    return folder
