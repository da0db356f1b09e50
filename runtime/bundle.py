"""A bundle on disk: opened by its manifest, checked before anything is loaded."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pspec.errors import BundleError
from pspec.files import sha256_file, write_file
from pspec.runtime.manifest import MANIFEST_FILE, SCHEMA_VERSION, Manifest

GRAPH_FOLDER = "graphs"


@dataclass(frozen=True)
class Bundle:
    """A folder and what its manifest says about it."""

    folder: Path
    manifest: Manifest

    @property
    def graphs(self) -> Path:
        """Folder of the ONNX files and their weights."""
        return self.folder / GRAPH_FOLDER


def open_bundle(folder: Path) -> Bundle:
    """Read the manifest and see that every file it names is there and has its size.

    Hashes are left to :func:`check_hashes`: they cost a read of all weights.

    Raises:
        BundleError: for a folder that is no bundle, another schema version, a missing or cut file.
    """
    path = folder / MANIFEST_FILE
    try:
        data = path.read_bytes()
    except OSError as error:
        hint = "make one with: pspec-export TARGET --output BUNDLE"
        raise BundleError(f"{folder} is no bundle: no readable {path.name}; {hint}") from error
    bundle = Bundle(folder, parse_manifest(data))
    for name, entry in bundle.manifest.files.items():
        file = folder / name
        if not file.is_file():
            raise BundleError(f"{folder}: {name} is missing; export the bundle again")
        size = file.stat().st_size
        if size != entry.bytes:
            raise BundleError(
                f"{folder}: {name} has {size} bytes, expected {entry.bytes}; export it again"
            )
    return bundle


def parse_manifest(data: bytes) -> Manifest:
    """Decode ``manifest.json``.

    Raises:
        BundleError: for another schema, for any key that is unknown, missing or ill-typed, and
            for a content that is not what was written.
    """
    try:
        raw = json.loads(data)
        version = raw["schema_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise BundleError(f"{MANIFEST_FILE} is damaged: no schema_version in it") from error
    if version != SCHEMA_VERSION:
        raise BundleError(
            f"{MANIFEST_FILE} has schema version {version}, this release reads {SCHEMA_VERSION}: "
            + (
                "update pspec"
                if isinstance(version, int) and version > SCHEMA_VERSION
                else "export again"
            )
        )
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as error:
        raise BundleError(f"{MANIFEST_FILE}: {error}") from error
    if manifest.checksum != _checksum(manifest):
        raise BundleError(f"{MANIFEST_FILE} is not what was exported (checksum differs)")
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` with the checksum of its content."""
    sealed = msgspec.structs.replace(manifest, checksum=_checksum(manifest))
    text = msgspec.json.format(msgspec.json.encode(sealed), indent=1)
    write_file(folder / MANIFEST_FILE, text + b"\n")


def _checksum(manifest: Manifest) -> str:
    """Hash of the values, however the file is laid out."""
    blank = msgspec.structs.replace(manifest, checksum="")
    text = json.dumps(msgspec.to_builtins(blank), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def check_hashes(bundle: Bundle) -> None:
    """Compare every file with its hash.

    Raises:
        BundleError: naming the first file that differs.
    """
    for name, entry in bundle.manifest.files.items():
        if sha256_file(bundle.folder / name) != entry.sha256:
            raise BundleError(f"{bundle.folder}: {name} is not what was exported (sha256 differs)")
