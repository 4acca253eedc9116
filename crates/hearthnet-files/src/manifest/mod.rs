//! Weights identity: identifies a model tensor by tensor.
//!
//! A [`Manifest`] lists a model's hyperparameters and, for every tensor, name, type, shape and
//! SHA-256. The SHA-256 of its canonical encoding is the model's [`WeightsId`]. Two files with the
//! same id compute the same numbers, whatever their other metadata. A host with three layers can
//! prove those three against the manifest, without the rest of the file.
//! `specs/weights-identity.md` has the rules, precise enough for a second implementation.

mod cache;
mod digest;
mod seal;
mod text;

use std::ops::Range;
use std::sync::mpsc;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

pub(crate) use cache::keep_record;
pub use cache::{ChangedError, Expected, FileState, Pinned, file_state, pieces_path, record_path};
pub use digest::{Digest, ParseDigestError, TextId, WeightsId};
pub use seal::record_key;

use crate::families::Family;
use crate::gguf::{Gguf, TensorInfo, TensorType};
use crate::model_file::ModelFile;
use crate::spec::ModelSpec;

/// Version of the encoding. It is encoded too, and so part of every id.
const FORMAT: &str = "hearthnet-weights-1";

/// Longest encoding that is decoded. A tensor takes some 100 bytes, and large models have 1,000.
pub const MAX_MANIFEST_BYTES: usize = 8 << 20;

/// Hyperparameters and tensors that identify a model.
#[derive(Clone, PartialEq, Debug)]
pub struct Manifest {
    spec: ModelSpec,
    tensors: Vec<TensorEntry>,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    pub name: String,
    pub dtype: TensorType,
    /// Lengths, one to three, row length first.
    pub dims: Vec<u64>,
    /// SHA-256 of the data as stored.
    pub sha256: Digest,
}

/// Encoded form of a manifest.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Encoded<S, T> {
    format: String,
    spec: S,
    tensors: T,
}

#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// More bytes than any manifest has.
    #[error("a manifest of {0} bytes is too long, at most {MAX_MANIFEST_BYTES} are accepted")]
    TooLong(usize),
    /// Not CBOR, or not of a manifest's structure.
    #[error("this is no weights manifest: {0}")]
    Structure(String),
    /// The hyperparameters, or the list of tensors, cannot be a model's.
    #[error("the weights manifest describes no model that can be run: {0}")]
    Model(String),
    /// Valid, but not in the canonical encoding, so that its hash is no identity.
    #[error("the weights manifest is not in its canonical encoding")]
    NotCanonical,
}

/// How a file differs from a manifest.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// Another family, another size, another RoPE, another boundary dtype.
    #[error("the model file's hyperparameters differ from those of the requested weights")]
    Spec,
    /// A layer range beyond the model.
    #[error("layers {start} to {end} are out of range: the model has {layers} layers")]
    Range {
        layers: u32,
        /// First layer of the range.
        start: u32,
        /// Last layer of the range.
        end: u32,
    },
    /// A tensor has other contents, another type or another shape.
    #[error(
        "tensor {0:?} of the model file differs from the requested weights: the file is damaged or is another version of the model"
    )]
    Tensor(String),
    /// The file is a part of the model without this tensor.
    #[error(
        "tensor {0:?} is not on this machine, which holds only a part of the model: fetch its layers first"
    )]
    NotHeld(String),
}

impl Manifest {
    /// Hashes every tensor of a file. `progress` receives the bytes done and the total.
    ///
    /// [`ModelFile::manifest`] does the same, but stores the result beside the file. Of a part, this
    /// is the manifest of the whole model, and nothing is hashed.
    pub fn of(model: &ModelFile, progress: &mut dyn FnMut(u64, u64)) -> Self {
        if let Some(manifest) = Self::of_part(model) {
            return manifest;
        }
        let tensors: Vec<&TensorInfo> = model.gguf().tensors().iter().collect();
        let hashes = hashes(model.gguf(), &tensors, progress);
        let entries = tensors.iter().zip(hashes);
        Self::from_hashes(model, entries.map(|(info, sha256)| (*info, sha256)))
    }

    /// Manifest of a whole file whose tensors have these hashes.
    pub(crate) fn from_hashes<'a>(
        model: &ModelFile,
        hashes: impl Iterator<Item = (&'a TensorInfo, Digest)>,
    ) -> Self {
        let entries = hashes.map(|(info, sha256)| TensorEntry {
            name: info.name.clone(),
            dtype: info.dtype,
            dims: info.dims.clone(),
            sha256,
        });
        let mut tensors: Vec<TensorEntry> = entries.collect();
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        Self {
            spec: model.spec().clone(),
            tensors,
        }
    }

    /// Manifest of the model that the file is a part of; `None` for a whole file.
    fn of_part(model: &ModelFile) -> Option<Self> {
        // It was decoded when the part was opened.
        let manifest = Self::decode(model.holdings()?.manifest()).ok()?;
        Some(Self {
            spec: model.spec().clone(),
            ..manifest
        })
    }

    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// All tensors, sorted by the bytes of their names.
    pub fn tensors(&self) -> &[TensorEntry] {
        &self.tensors
    }

    pub fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        let at = self
            .tensors
            .binary_search_by(|entry| entry.name.as_str().cmp(name))
            .ok()?;
        self.tensors.get(at)
    }

    pub fn weights_id(&self) -> WeightsId {
        WeightsId::of(&self.encode())
    }

    /// Canonical encoding: deterministic CBOR (RFC 8949 section 4.2.1).
    #[allow(clippy::expect_used)] // plain data into memory; a partial id would be wrong
    pub fn encode(&self) -> Vec<u8> {
        let encoded = Encoded {
            format: FORMAT.to_owned(),
            spec: &self.spec,
            tensors: &self.tensors,
        };
        let mut value = ciborium::Value::serialized(&encoded).expect("plain data has a CBOR value");
        sort_maps(&mut value);
        let mut out = Vec::new();
        ciborium::into_writer(&value, &mut out).expect("writing to memory does not fail");
        out
    }

    /// Decodes an untrusted manifest. Memory is bounded by a small multiple of the length, which is
    /// limited.
    ///
    /// # Errors
    /// The bytes are no manifest, describe an impossible model, or are not the canonical encoding.
    pub fn decode(bytes: &[u8]) -> Result<Self, ManifestError> {
        if bytes.len() > MAX_MANIFEST_BYTES {
            return Err(ManifestError::TooLong(bytes.len()));
        }
        // The deepest value of a manifest is a tensor's list of dimensions.
        let decoded: Encoded<ModelSpec, Vec<TensorEntry>> =
            ciborium::de::from_reader_with_recursion_limit(bytes, 8)
                .map_err(|error| ManifestError::Structure(error.to_string()))?;
        if decoded.format != FORMAT {
            let format: String = decoded.format.chars().take(40).collect();
            return Err(ManifestError::Structure(format!(
                "unknown format {format:?}"
            )));
        }
        let manifest = Self {
            spec: decoded.spec,
            tensors: decoded.tensors,
        };
        manifest.check()?;
        if manifest.encode() != bytes {
            return Err(ManifestError::NotCanonical);
        }
        Ok(manifest)
    }

    /// Checks that the spec is valid and that the tensors are exactly those of the family.
    fn check(&self) -> Result<(), ManifestError> {
        let fail = |reason: String| Err(ManifestError::Model(reason));
        let Some(family) = Family::named(&self.spec.architecture) else {
            return fail("its architecture is not supported".to_owned());
        };
        if let Err(error) = self.spec.check() {
            return fail(error.to_string());
        }
        if !self.tensors.is_sorted_by(|a, b| a.name < b.name) {
            return fail("its tensors are not in order".to_owned());
        }
        let mut count = 0;
        // A hostile layer count ends at the first missing tensor.
        for (name, lengths) in family.tensors(&self.spec) {
            let Some(entry) = self.tensor(&name) else {
                return fail(format!("tensor {name:?} is missing"));
            };
            if entry.dims != lengths {
                return fail(format!("tensor {name:?} has the wrong shape"));
            }
            count += 1;
        }
        match self.tensors.len() == count {
            true => Ok(()),
            false => fail("it lists tensors that the model does not have".to_owned()),
        }
    }

    /// Proves that a file's layers (half-open range) match this manifest; with `head`, also its
    /// embedding, last norm and output matrix. Reads only their tensors. `progress` receives the
    /// bytes done and the total.
    ///
    /// # Errors
    /// Names the first difference.
    pub fn verify(
        &self,
        model: &ModelFile,
        layers: Range<u32>,
        head: bool,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), VerifyError> {
        if *model.spec() != self.spec {
            return Err(VerifyError::Spec);
        }
        if layers.start > layers.end || layers.end > self.spec.layers {
            let (start, end) = (layers.start, layers.end.saturating_sub(1));
            return Err(VerifyError::Range {
                layers: self.spec.layers,
                start,
                end,
            });
        }
        let head = model.head_tensors().filter(|_| head);
        let shared = model.shared_tensors().filter(|_| !layers.is_empty());
        let tensors: Vec<&TensorInfo> = head
            .chain(shared)
            .chain(layers.clone().flat_map(|layer| model.layer_tensors(layer)))
            .collect();
        let other = |info: &TensorInfo| VerifyError::Tensor(info.name.clone());
        // A tensor of another type or shape need not be read.
        let wanted = |info: &&TensorInfo| self.entry_of(info).ok_or_else(|| other(info));
        let wanted: Vec<&TensorEntry> = tensors.iter().map(wanted).collect::<Result<_, _>>()?;
        // A hole reads as zeros.
        if let Some(info) = tensors.iter().find(|info| !model.holds(info)) {
            return Err(VerifyError::NotHeld(info.name.clone()));
        }
        let found = hashes(model.gguf(), &tensors, progress);
        let mut each = tensors.iter().zip(wanted.iter().zip(&found));
        if let Some((info, _)) = each.find(|(_, (wanted, found))| wanted.sha256 != **found) {
            if let Some(part) = model.holdings() {
                // Forgets the damaged pieces, so that they are fetched again.
                part.is_genuine(info, model.gguf().data(info));
            }
            return Err(other(info));
        }
        // The digests are those of the part only if both manifests list the same tensors.
        if Self::of_part(model).is_some_and(|part| part.tensors == self.tensors) {
            tensors.iter().for_each(|info| model.set_genuine(info));
        }
        Ok(())
    }

    /// Whether names, types and shapes match the file, regardless of contents.
    fn lists(&self, model: &ModelFile) -> bool {
        let tensors = model.gguf().tensors();
        tensors.len() == self.tensors.len()
            && tensors.iter().all(|info| self.entry_of(info).is_some())
    }

    /// The tensor of this name, if its type and shape are those of the file's one.
    fn entry_of(&self, info: &TensorInfo) -> Option<&TensorEntry> {
        let entry = self.tensor(&info.name);
        entry.filter(|entry| entry.dtype == info.dtype && entry.dims == info.dims)
    }
}

/// Hashes tensors in parallel, as [`hash_each`].
fn hashes(gguf: &Gguf, tensors: &[&TensorInfo], progress: &mut dyn FnMut(u64, u64)) -> Vec<Digest> {
    let data: Vec<&[u8]> = tensors.iter().map(|info| gguf.data(info)).collect();
    hash_each(gguf, &data, progress)
}

/// Hashes ranges of a file in parallel, one task each, and releases the file's pages. `progress`
/// receives the bytes done and the total.
pub(crate) fn hash_each(
    gguf: &Gguf,
    ranges: &[&[u8]],
    progress: &mut dyn FnMut(u64, u64),
) -> Vec<Digest> {
    let total = ranges.iter().map(|data| data.len() as u64).sum();
    let (read, reads) = mpsc::channel();
    let mut done = 0;
    // Rayon's global pool would panic if the system provides no thread.
    let Ok(pool) = rayon::ThreadPoolBuilder::new().build() else {
        let each = ranges.iter().map(|data| {
            let digest = hash(gguf, data, &read);
            done += data.len() as u64;
            progress(done, total);
            digest
        });
        return each.collect();
    };
    let mut digests = Vec::new();
    let all = &mut digests;
    pool.in_place_scope(|scope| {
        scope.spawn(move |_| {
            let each = ranges.par_iter();
            *all = each
                .map_with(read, |read, data| hash(gguf, data, read))
                .collect();
        });
        for bytes in reads {
            done += bytes;
            progress(done, total);
        }
    });
    digests
}

/// Hashes a range, and sends the length of each chunk to `read`.
fn hash(gguf: &Gguf, data: &[u8], read: &mpsc::Sender<u64>) -> Digest {
    use sha2::Digest as _;
    let mut hash = sha2::Sha256::new();
    // Some milliseconds of work between reports.
    for chunk in data.chunks(4 << 20) {
        hash.update(chunk);
        gguf.release(chunk);
        // The receiver listens until the end.
        let _ = read.send(chunk.len() as u64);
    }
    Digest(hash.finalize().into())
}

/// Sorts the keys of all maps by the bytes of their encodings. All keys are short texts, whose
/// encoding begins with the length.
fn sort_maps(value: &mut ciborium::Value) {
    match value {
        ciborium::Value::Map(pairs) => {
            pairs.iter_mut().for_each(|(_, value)| sort_maps(value));
            pairs.sort_by(|(a, _), (b, _)| {
                let key = |value: &ciborium::Value| {
                    value.as_text().map(|text| (text.len(), text.to_owned()))
                };
                key(a).cmp(&key(b))
            });
        }
        ciborium::Value::Array(values) => values.iter_mut().for_each(sort_maps),
        _ => {}
    }
}
