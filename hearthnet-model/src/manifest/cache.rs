//! Keeps a manifest beside its model, so that a large file is hashed once.
//!
//! What is kept is believed only if the model's size and time of modification are as they were
//! and the manifest describes the file's tensors. It is a convenience, not a proof: a host proves
//! the tensors that it serves with [`Manifest::verify`].

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};

use super::{MAX_MANIFEST_BYTES, Manifest};
use crate::atomic_file;
use crate::model_file::ModelFile;

/// Size and time of modification of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Stamp {
    bytes: u64,
    /// Since the beginning of 1970, UTC.
    modified_ns: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    stamp: Stamp,
    /// The canonical encoding.
    manifest: ciborium::Value,
}

fn stamp(path: &Path) -> Option<Stamp> {
    let info = fs::metadata(path).ok()?;
    let modified = info.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
    Some(Stamp {
        bytes: info.len(),
        modified_ns: u64::try_from(modified.as_nanos()).ok()?,
    })
}

fn place(model: &Path) -> PathBuf {
    let mut name = OsString::from(model);
    name.push(".hearthnet");
    PathBuf::from(name)
}

/// What was kept for this file, if it still holds.
pub(super) fn load(model: &ModelFile) -> Option<Manifest> {
    let path = model.path()?;
    let kept = place(path);
    // A little more than the manifest itself.
    if fs::metadata(&kept).ok()?.len() > MAX_MANIFEST_BYTES as u64 + 256 {
        return None;
    }
    let bytes = fs::read(kept).ok()?;
    let kept: Kept = ciborium::de::from_reader_with_recursion_limit(&bytes[..], 4).ok()?;
    if kept.stamp != stamp(path)? || kept.stamp.bytes != model.gguf().file_bytes() {
        return None;
    }
    let manifest = Manifest::decode(kept.manifest.as_bytes()?).ok()?;
    manifest.describes(model).then_some(manifest)
}

/// Keeps a manifest that was just made. The file must not have changed since it was opened.
pub(super) fn store(model: &ModelFile, manifest: &Manifest) -> io::Result<()> {
    let path = model.path().ok_or(io::ErrorKind::Unsupported)?;
    let now = stamp(path).ok_or(io::ErrorKind::Unsupported)?;
    if model.gguf().modified() != fs::metadata(path)?.modified().ok()
        || now.bytes != model.gguf().file_bytes()
    {
        return Err(io::Error::other(
            "the model file changed while it was hashed",
        ));
    }
    let kept = Kept {
        stamp: now,
        manifest: ciborium::Value::Bytes(manifest.encode()),
    };
    let mut bytes = Vec::new();
    ciborium::into_writer(&kept, &mut bytes).map_err(io::Error::other)?;
    atomic_file::write(&place(path), &bytes)
}
