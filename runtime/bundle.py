"""A bundle on disk: opened by its manifest, checked before anything is loaded."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from pspec.errors import BundleError
from pspec.files import sha256_file, write_file
from pspec.runtime.manifest import MANIFEST_FILE, SCHEMA_VERSION, GraphSpec, Manifest

GRAPH_FOLDER = "graphs"

# Inputs and outputs the runtime knows by name; caches and features come with the model.
_NEEDED = {
    "target": (
        {"token_ids", "position_ids", "tree_mask", "cache_length", "logit_rows"},
        {"next_token", "logits"},
    ),
    "drafter": (
        {"token_ids", "token_count", "cache_length"},
        {"draft_ids", "draft_logprobs"},
    ),
}


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
        BundleError: for a folder that is no bundle, another schema version, a manifest that
            contradicts itself, a missing or cut file.
    """
    path = folder / MANIFEST_FILE
    try:
        data = path.read_bytes()
    except OSError as error:
        hint = "make one with: pspec-export TARGET --output BUNDLE"
        raise BundleError(f"{folder} is no bundle: no readable {path.name}; {hint}") from error
    bundle = Bundle(folder, parse_manifest(data))
    check_manifest(bundle.manifest)
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


def check_manifest(manifest: Manifest) -> None:
    """See that what a manifest lists fits together; the schema alone cannot say.

    Raises:
        BundleError: naming the first entry that is wrong.
    """
    for name in manifest.files:
        if not _stays_inside(name):
            raise BundleError(f"{MANIFEST_FILE}: file {name!r} is no place inside the bundle")
    for name in ("weights.data", *(graph.file for graph in manifest.graphs)):
        if f"{GRAPH_FOLDER}/{name}" not in manifest.files:
            raise BundleError(f"{MANIFEST_FILE}: {GRAPH_FOLDER}/{name} is not among its files")
    roles = {"target", *(["drafter"] if manifest.drafter else [])}
    for role in sorted(roles | {graph.role for graph in manifest.graphs}):
        if not any(graph.role == role and graph.is_symbolic for graph in manifest.graphs):
            raise BundleError(f"{MANIFEST_FILE}: no symbolic graph for the {role}")
    for graph in manifest.graphs:
        _check_needed(graph)
    plan = manifest.plan
    if sorted({*plan.buckets}) != [*plan.buckets] or not plan.buckets:
        raise BundleError(f"{MANIFEST_FILE}: buckets {[*plan.buckets]} do not ascend")
    if min(plan.batch, plan.nodes, plan.accepted, plan.chunk, *plan.buckets) < 1:
        raise BundleError(f"{MANIFEST_FILE}: a number of the plan is below 1")


def _check_needed(graph: GraphSpec) -> None:
    for wanted, specs in zip(_NEEDED[graph.role], (graph.inputs, graph.outputs), strict=True):
        missing = sorted(wanted - {spec.name for spec in specs})
        if missing:
            raise BundleError(f"{MANIFEST_FILE}: graph {graph.file} has no {missing[0]}")


def _stays_inside(name: str) -> bool:
    """Whether a name is a plain relative path, on whatever system reads it."""
    path = PurePosixPath(name)
    plain = name == str(path) and not any(sign in name for sign in "\\:\0")
    return plain and not path.is_absolute() and ".." not in path.parts


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
