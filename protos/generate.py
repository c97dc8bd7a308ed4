"""Generate the Python code of the protos into `tessera/`; `--check` compares instead and fails on drift.

python protos/generate.py [--check]
"""

from __future__ import annotations

import argparse
import filecmp
import sys
import tempfile
from importlib import resources
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
PACKAGE = ROOT / "tessera"


def generate(target: Path) -> list[Path]:
    """Write the generated modules below `target` and return them relative to it, sorted."""
    from grpc_tools import protoc

    sources = sorted(str(p.relative_to(PROTOS)) for p in PROTOS.glob("tessera/**/*.proto"))
    well_known = str(resources.files("grpc_tools") / "_proto")
    flags = [f"--{kind}={target}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    status = protoc.main(["protoc", f"-I{PROTOS}", f"-I{well_known}", *flags, *sources])
    if status != 0:
        raise SystemExit(f"protoc failed with status {status}")
    folders = {p.parent for p in target.glob("tessera/**/*.py")} | set(target.glob("tessera/*/"))
    for folder in (folder for folder in folders if folder.name != "__pycache__"):
        (folder / "__init__.py").touch()
    (target / "tessera" / "__init__.py").touch()
    (target / "tessera" / "py.typed").touch()
    return sorted(p.relative_to(target) for p in target.glob("tessera/**/*") if p.is_file())


def drift() -> list[str]:
    """Names of generated files that differ from what the protos give; empty means none."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        names = generate(fresh)
        have = {
            p.relative_to(ROOT) for p in PACKAGE.glob("**/*") if p.is_file() and p.suffix in {".py", ".pyi", ".typed"}
        }
        wrong = [n for n in names if n not in have or not filecmp.cmp(fresh / n, ROOT / n, shallow=False)]
        return sorted(str(n) for n in wrong) + sorted(str(n) for n in have - set(names))


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare with what is there; write nothing")
    if not parser.parse_args().check:
        sys.stdout.write(f"generated {len(generate(ROOT))} files\n")
        return 0
    wrong = drift()
    for name in wrong:
        sys.stderr.write(f"differs from the protos: {name}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
