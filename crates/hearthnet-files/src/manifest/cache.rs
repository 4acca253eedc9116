//! Manifest record beside a model file. It saves hashing a large file again, and reveals a change
//! of the file.
//!
//! A record is valid while size, times and inode of the file are unchanged, it describes the file's
//! tensors, and it carries a [`seal`]: proof that this user's programs wrote it on this machine.
//! Without the seal, a record that came with the file, or that another user put there, could pass
//! any weights off as genuine.
//!
//! Every write through the file system changes the inode's change time, which no program can set
//! back. Corruption below the file system (a failing disk) is detected only by
//! [`ModelFile::verify`], which reads all bytes.
//!
//! If the record does not fit, the file is hashed again. An unchanged file gets a new record. A
//! changed one is refused until it is accepted ([`ModelFile::accept`]) or fetched again. Digests in
//! the catalogue overrule any record.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use hearthnet_platform::{regular_file, whole_file};
use serde::{Deserialize, Serialize};

use super::seal::{MAC_BYTES, seal};
use super::{Digest, MAX_MANIFEST_BYTES, Manifest, WeightsId};
use crate::model_file::ModelFile;
use crate::stamp::{Stamp, stamp};

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredRecord {
    stamp: Stamp,
    /// Canonical encoding.
    manifest: ciborium::Value,
    /// SHA-256 of everything before the tensors: tokenizer, template, hyperparameters.
    head: Digest,
}

/// Decoded record.
struct Record {
    stamp: Stamp,
    contents: Contents,
}

/// Result of reading a whole file.
#[derive(PartialEq)]
struct Contents {
    manifest: Manifest,
    head: Digest,
}

/// State of a model file according to its record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum FileState {
    /// Unchanged since it was read as a whole; these are its weights.
    Verified(WeightsId),
    /// Read before, and written to or moved since.
    Changed,
    /// There is no valid record.
    Unverified,
}

/// The file differs from its record or from the catalogue.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{} {relation}: {what}", path.display())]
#[non_exhaustive]
pub struct ChangedError {
    pub path: PathBuf,
    /// Verb phrase with the reference.
    relation: &'static str,
    /// Description of the difference.
    what: String,
    /// Whether the catalogue or the first pull pins the file. Otherwise the reference is the
    /// record, and [`ModelFile::accept`] can overrule it.
    pub pinned: bool,
}

/// Contents that the catalogue of models, or the first pull, requires of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Expected {
    /// SHA-256 of the file, if known.
    pub sha256: Option<Digest>,
    /// Identity of the weights in the file, if known.
    pub weights: Option<WeightsId>,
    pub pinned: Pinned,
}

/// Origin of the SHA-256 of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Pinned {
    Catalogue,
    /// The first pull on this machine.
    FirstPull,
    /// The file is not pinned yet.
    #[default]
    Never,
}

/// Path of the record of a model file.
pub fn record_path(model: &Path) -> PathBuf {
    beside(model, ".hearthnet")
}

/// Path of the piece list of a model file.
pub fn pieces_path(model: &Path) -> PathBuf {
    beside(model, ".hearthnet-pieces")
}

fn beside(model: &Path, ending: &str) -> PathBuf {
    let mut name = OsString::from(model);
    name.push(ending);
    PathBuf::from(name)
}

/// Seal of a piece list. The weights id determines the list, so it holds for each file with these
/// weights, whatever the stamp of the file.
fn list_seal(weights: &WeightsId, list: &[u8]) -> Option<[u8; MAC_BYTES]> {
    seal(&[&b"pieces"[..], &weights.0, list].concat())
}

/// Does `work`, which gives a file another name, or takes one away. That changes the stamp of the
/// file, but no content: a record that was valid before is renewed.
pub(crate) fn keep_record<T>(path: &Path, work: impl FnOnce() -> T) -> T {
    let valid = read(path).filter(|record| Some(record.stamp) == stamp(path));
    let done = work();
    if let Some(record) = valid
        && let Some(now) = stamp(path).filter(|now| now.has_contents_of(&record.stamp))
        && let Err(error) = write(path, now, &record.contents)
    {
        tracing::debug!(%error, "the record beside the model cannot be renewed");
    }
    done
}

fn read(path: &Path) -> Option<Record> {
    // Some bytes more than the longest manifest.
    let most = MAX_MANIFEST_BYTES as u64 + 512;
    let bytes = regular_file::read(&record_path(path), most).ok()?;
    let (mac, bytes) = bytes.split_first_chunk::<MAC_BYTES>()?;
    if seal(bytes)? != *mac {
        return None;
    }
    let stored: StoredRecord = ciborium::de::from_reader_with_recursion_limit(bytes, 4).ok()?;
    Some(Record {
        stamp: stored.stamp,
        contents: Contents {
            manifest: Manifest::decode(stored.manifest.as_bytes()?).ok()?,
            head: stored.head,
        },
    })
}

/// State of the file at `path`, without reading it.
pub fn file_state(path: &Path) -> FileState {
    match read(path) {
        None => FileState::Unverified,
        Some(record) if Some(record.stamp) == stamp(path) => {
            FileState::Verified(record.contents.manifest.weights_id())
        }
        Some(_) => FileState::Changed,
    }
}

/// Stores a record. Fails if the file has changed since it was opened.
fn store(model: &ModelFile, contents: &Contents) -> io::Result<()> {
    let path = model.path().ok_or(io::ErrorKind::Unsupported)?;
    let now = stamp(path).ok_or(io::ErrorKind::Unsupported)?;
    if model.is_replaced() || now.bytes != model.gguf().stored_bytes() {
        return Err(io::Error::other(
            "the model file changed while it was hashed",
        ));
    }
    write(path, now, contents)
}

fn write(path: &Path, stamp: Stamp, contents: &Contents) -> io::Result<()> {
    let stored = StoredRecord {
        stamp,
        manifest: ciborium::Value::Bytes(contents.manifest.encode()),
        head: contents.head,
    };
    let mut bytes = Vec::new();
    ciborium::into_writer(&stored, &mut bytes).map_err(io::Error::other)?;
    let mac = seal(&bytes).ok_or(io::ErrorKind::Unsupported)?;
    whole_file::write(&record_path(path), &[&mac[..], &bytes].concat())
}

/// Stores a record if possible. A read-only folder costs only another reading.
fn try_store(model: &ModelFile, contents: &Contents) {
    if let Err(error) = store(model, contents)
        && error.kind() != io::ErrorKind::Unsupported
    {
        tracing::debug!(%error, "the record cannot be stored beside the model");
    }
}

fn read_contents(model: &ModelFile, progress: &mut dyn FnMut(u64, u64)) -> Contents {
    let manifest = Manifest {
        spec: model.stored_spec(),
        ..Manifest::of(model, progress)
    };
    Contents {
        manifest,
        head: Digest::of(model.gguf().head()),
    }
}

impl ModelFile {
    /// Manifest of the file. Hashing reads the whole file, so the result is stored beside it
    /// (`NAME.gguf.hearthnet`) if possible, and reused while the file is unchanged. A contradicting
    /// record is left in place, so that [`Self::check`] refuses the file. `progress` receives the
    /// bytes done and the total; it is not called if nothing is hashed.
    ///
    /// A part has the manifest of the whole model, and no record.
    pub fn manifest(&self, progress: &mut dyn FnMut(u64, u64)) -> Manifest {
        if let Some(manifest) = Manifest::of_part(self) {
            return manifest;
        }
        let record = self.path().and_then(read);
        if let Some(record) = record.as_ref().filter(|r| self.is_as(r)) {
            return self.in_use(record.contents.manifest.clone());
        }
        let contents = read_contents(self, progress);
        if record.is_none_or(|record| record.contents == contents) {
            try_store(self, &contents);
        }
        self.in_use(contents.manifest)
    }

    /// Manifest of a file before use. The file must match its record and, if `pin` is given, the
    /// catalogue. An unchanged file is not read, nor is a part: its tensors are hashed when they are
    /// read ([`ModelFile::tensor`]).
    ///
    /// # Errors
    /// The file differs.
    pub fn check(
        &self,
        pin: Option<Expected>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Manifest, ChangedError> {
        if let Some(manifest) = Manifest::of_part(self) {
            return Ok(manifest);
        }
        let record = self.path().and_then(read);
        // A record holds the weights id, not the file's digest. If the catalogue pins only the
        // digest, the whole file is read.
        let as_pinned = |record: &Record| {
            pinned(pin).is_none_or(|pin| pin.weights == Some(record.contents.manifest.weights_id()))
        };
        let fits = |record: &&Record| self.is_as(record) && as_pinned(record);
        match record.as_ref().filter(fits) {
            Some(record) => Ok(self.in_use(record.contents.manifest.clone())),
            None => self.compare(record, pin, progress),
        }
    }

    /// Same as [`Self::check`], but always reads all bytes; of a part, all that it holds. Damaged
    /// pieces of a part are no longer held, so that they are fetched again.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub fn verify(
        &self,
        pin: Option<Expected>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Manifest, ChangedError> {
        let Some((part, manifest)) = self.holdings().zip(Manifest::of_part(self)) else {
            return self.compare(self.path().and_then(read), pin, progress);
        };
        let what = match part.verify(progress) {
            Ok(None) => return Ok(manifest),
            Ok(Some(name)) => format!("tensor {name:?} is damaged and will be fetched again"),
            Err(error) => error.to_string(),
        };
        Err(ChangedError {
            path: self.path().unwrap_or(Path::new("")).to_owned(),
            relation: "differs from the adopted model",
            what,
            pinned: true,
        })
    }

    /// Accepts the current contents of the file whatever its record, and returns the manifest. Has no
    /// effect on a part, whose contents the adoption decides.
    pub fn accept(&self, progress: &mut dyn FnMut(u64, u64)) -> Manifest {
        if let Some(manifest) = Manifest::of_part(self) {
            return manifest;
        }
        let contents = read_contents(self, progress);
        try_store(self, &contents);
        self.in_use(contents.manifest)
    }

    /// Piece list of so many bytes, if it was stored beside the file for these weights.
    pub(crate) fn stored_pieces(&self, weights: &WeightsId, bytes: u64) -> Option<Vec<u8>> {
        let path = pieces_path(self.path()?);
        let stored = regular_file::read(&path, bytes + MAC_BYTES as u64).ok()?;
        let (mac, list) = stored.split_first_chunk::<MAC_BYTES>()?;
        let is_genuine = list.len() as u64 == bytes && list_seal(weights, list)? == *mac;
        is_genuine.then(|| list.to_vec())
    }

    /// Stores a piece list beside the file, if possible. A part has a list of its own.
    pub(crate) fn store_pieces(&self, weights: &WeightsId, list: &[u8]) {
        let path = self.path().filter(|_| self.holdings().is_none());
        let Some((path, mac)) = path.zip(list_seal(weights, list)) else {
            return;
        };
        if let Err(error) = whole_file::write(&pieces_path(path), &[&mac[..], list].concat()) {
            tracing::debug!(%error, "the piece list cannot be stored beside the model");
        }
    }

    fn compare(
        &self,
        record: Option<Record>,
        pin: Option<Expected>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Manifest, ChangedError> {
        let contents = read_contents(self, progress);
        let pin = pinned(pin);
        if let Some((relation, what)) = self.difference(&contents, record, pin) {
            return Err(ChangedError {
                path: self.path().unwrap_or(Path::new("")).to_owned(),
                relation,
                what,
                pinned: pin.is_some(),
            });
        }
        try_store(self, &contents);
        Ok(self.in_use(contents.manifest))
    }

    /// Relation of the contents to those that are pinned, or else recorded, and the difference.
    fn difference(
        &self,
        contents: &Contents,
        record: Option<Record>,
        pin: Option<Expected>,
    ) -> Option<(&'static str, String)> {
        let text = "its tokenizer or description is different";
        if let Some(pin) = pin {
            let relation = match pin.pinned {
                Pinned::FirstPull => "differs from the first download",
                _ => "differs from the file in the catalogue",
            };
            let weights = contents.manifest.weights_id();
            if pin.weights.is_some_and(|pinned| pinned != weights) {
                return Some((relation, "its weights are different".to_owned()));
            }
            // The weights id does not cover tokenizer and template.
            let (pinned, found) = (pin.sha256?, Digest::of_all(&self.gguf().files()));
            let what = match pin.weights {
                Some(_) => text.to_owned(),
                None => format!("its SHA-256 is {found} instead of {pinned}"),
            };
            return (found != pinned).then_some((relation, what));
        }
        let was = record?.contents;
        let (count, all) = differing(&was.manifest, &contents.manifest);
        let what = if count > 0 {
            format!("{count} of {all} tensors differ")
        } else if was.manifest != contents.manifest {
            "its hyperparameters are different".to_owned()
        } else if was.head != contents.head {
            text.to_owned()
        } else {
            return None;
        };
        Some(("has changed since it was last used", what))
    }

    /// Weights id of the file without the formats that the user has chosen.
    pub fn stored_weights(&self, manifest: &Manifest) -> WeightsId {
        let stored = Manifest {
            spec: self.stored_spec(),
            ..manifest.clone()
        };
        stored.weights_id()
    }

    /// Turns the manifest of the file as stored into that of the file as used.
    fn in_use(&self, manifest: Manifest) -> Manifest {
        Manifest {
            spec: self.spec().clone(),
            ..manifest
        }
    }

    /// Whether the file is unchanged since the record was made.
    fn is_as(&self, record: &Record) -> bool {
        self.path().and_then(stamp) == Some(record.stamp)
            && record.stamp.bytes == self.gguf().stored_bytes()
            && record.contents.manifest.spec == self.stored_spec()
            && record.contents.manifest.lists(self)
    }
}

/// The expected contents, if they pin the file or its weights.
fn pinned(pin: Option<Expected>) -> Option<Expected> {
    pin.filter(|pin| pin.sha256.is_some() || pin.weights.is_some())
}

/// Number of tensors that were changed, added or removed, and of all tensors.
fn differing(was: &Manifest, now: &Manifest) -> (usize, usize) {
    let changed = now.tensors().iter();
    let changed = changed.filter(|entry| was.tensor(&entry.name) != Some(entry));
    let gone = was.tensors().iter();
    let gone = gone.filter(|entry| now.tensor(&entry.name).is_none());
    let gone = gone.count();
    (changed.count() + gone, now.tensors().len() + gone)
}
