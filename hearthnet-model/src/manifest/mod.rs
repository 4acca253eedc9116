//! Weights identity: what exactly a model is, tensor by tensor.
//!
//! A [`Manifest`] lists a model's hyperparameters and, of every tensor, name, type, shape and
//! SHA-256. The SHA-256 of its canonical encoding is the model's [`WeightsId`]: two files with the
//! same id compute the same numbers, whatever else they say about themselves, and a host that
//! holds three layers can prove those three against the manifest without the rest of the file.
//! `specs/weights-identity.md` has the rules, precise enough for a second implementation.

mod cache;
mod digest;
mod seal;
mod text;

use std::ops::Range;
use std::sync::mpsc;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

pub use cache::{ChangedError, FileState, file_state, record_path};
pub(crate) use cache::{Stamp, stamp};
pub use digest::{Digest, ParseDigestError, TextId, WeightsId};
pub use seal::record_key;

use crate::families::Family;
use crate::gguf::{Gguf, TensorInfo, TensorType};
use crate::model_file::ModelFile;
use crate::spec::ModelSpec;

/// Version of the encoding; part of it, and so of every id.
const FORMAT: &str = "hearthnet-weights-1";

/// Longest encoding that is decoded. A tensor takes some 100 bytes and large models have 1,000.
pub const MAX_MANIFEST_BYTES: usize = 8 << 20;

/// The identity of a model, in full.
#[derive(Clone, PartialEq, Debug)]
pub struct Manifest {
    spec: ModelSpec,
    tensors: Vec<TensorEntry>,
}

/// One tensor of a manifest.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// Name in the file.
    pub name: String,
    /// How values are stored.
    pub dtype: TensorType,
    /// One to three lengths, row length first.
    pub dims: Vec<u64>,
    /// SHA-256 of the data as stored.
    pub sha256: Digest,
}

/// What is encoded.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Encoded<S, T> {
    format: String,
    spec: S,
    tensors: T,
}

/// Why bytes are no manifest.
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
    /// A valid manifest in another than the canonical encoding, whose hash would be no identity.
    #[error("the weights manifest is not in its canonical encoding")]
    NotCanonical,
}

/// How a file differs from a manifest.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// Another family, another size, another RoPE, another boundary dtype.
    #[error("the model file has other hyperparameters than the weights that were asked for")]
    Spec,
    /// A layer range beyond the model.
    #[error("the model has {layers} layers, {start} to {end} are not all among them")]
    Range {
        /// Layers of the model.
        layers: u32,
        /// First layer asked for.
        start: u32,
        /// Last layer asked for.
        end: u32,
    },
    /// A tensor has other contents, another type or another shape.
    #[error(
        "tensor {0:?} of the model file differs from the weights that were asked for: the file is damaged or is another version of the model"
    )]
    Tensor(String),
}

impl Manifest {
    /// Hashes every tensor of a file. `progress` gets the bytes done and the bytes in all.
    ///
    /// [`ModelFile::manifest`] does the same but remembers the result beside the file.
    pub fn of(model: &ModelFile, progress: &mut dyn FnMut(u64, u64)) -> Self {
        let tensors: Vec<&TensorInfo> = model.gguf().tensors().iter().collect();
        let hashes = hashes(model.gguf(), &tensors, progress);
        let entries = tensors
            .iter()
            .zip(hashes)
            .map(|(info, sha256)| TensorEntry {
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

    /// The model's hyperparameters.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// All tensors, in the order of their names' bytes.
    pub fn tensors(&self) -> &[TensorEntry] {
        &self.tensors
    }

    /// The entry of a tensor.
    pub fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        let at = self
            .tensors
            .binary_search_by(|entry| entry.name.as_str().cmp(name))
            .ok()?;
        self.tensors.get(at)
    }

    /// The identity of the weights.
    pub fn weights_id(&self) -> WeightsId {
        WeightsId::of(&self.encode())
    }

    /// The canonical encoding: CBOR, deterministic as RFC 8949 section 4.2.1 defines it.
    #[allow(clippy::expect_used)] // of plain data into memory; an id of less would be no identity
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

    /// Decodes a manifest from an untrusted source.
    ///
    /// # Errors
    /// When the bytes are no manifest, describe an impossible model, or are not the canonical
    /// encoding. Memory used is a small multiple of the length, which is bounded.
    pub fn decode(bytes: &[u8]) -> Result<Self, ManifestError> {
        if bytes.len() > MAX_MANIFEST_BYTES {
            return Err(ManifestError::TooLong(bytes.len()));
        }
        // Nothing in a manifest is nested deeper than a tensor's dimensions.
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

    /// Checks that the spec is possible and that the tensors are exactly those of the family.
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
        // A hostile layer count ends at the first tensor that is not listed.
        for (name, dims) in family.tensors(&self.spec) {
            let Some(entry) = self.tensor(&name) else {
                return fail(format!("tensor {name:?} is missing"));
            };
            if !entry
                .dims
                .iter()
                .copied()
                .eq(dims.iter().map(|dim| dim.of(&self.spec)))
            {
                return fail(format!("tensor {name:?} has the wrong shape"));
            }
            count += 1;
        }
        match self.tensors.len() == count {
            true => Ok(()),
            false => fail("it lists tensors that the model does not have".to_owned()),
        }
    }

    /// Proves that a file's layers (half-open range) and, if `head` is set, its embedding, last
    /// norm and output matrix are those of this manifest. Only their tensors are read.
    /// `progress` gets the bytes done and the bytes in all.
    ///
    /// # Errors
    /// Names what differs.
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
        // What is not even of that type and shape need not be read.
        let listed = |info: &TensorInfo| {
            let entry = self.tensor(&info.name);
            entry.filter(|entry| entry.dtype == info.dtype && entry.dims == info.dims)
        };
        let wanted: Vec<Digest> = tensors
            .iter()
            .map(|info| listed(info).map(|e| e.sha256).ok_or_else(|| other(info)))
            .collect::<Result<_, _>>()?;
        let found = hashes(model.gguf(), &tensors, progress);
        let mut each = tensors.iter().zip(wanted.iter().zip(&found));
        match each.find(|(_, (wanted, found))| wanted != found) {
            Some((info, _)) => Err(other(info)),
            None => Ok(()),
        }
    }

    /// Whether names, types and shapes are those of the file; contents are not looked at.
    fn lists(&self, model: &ModelFile) -> bool {
        model.gguf().tensors().len() == self.tensors.len()
            && model.gguf().tensors().iter().all(|info| {
                self.tensor(&info.name)
                    .is_some_and(|entry| entry.dtype == info.dtype && entry.dims == info.dims)
            })
    }
}

/// Hashes tensors side by side, each as a whole, and lets the file's pages go. `progress` gets the
/// bytes done and the bytes in all.
fn hashes(gguf: &Gguf, tensors: &[&TensorInfo], progress: &mut dyn FnMut(u64, u64)) -> Vec<Digest> {
    let total = tensors.iter().map(|info| info.bytes).sum();
    let (read, reads) = mpsc::channel();
    let mut done = 0;
    // Rayon's own pool would panic where the system gives no thread.
    let Ok(pool) = rayon::ThreadPoolBuilder::new().build() else {
        let each = tensors.iter().map(|info| {
            let digest = hash(gguf, info, &read);
            done += info.bytes;
            progress(done, total);
            digest
        });
        return each.collect();
    };
    let mut digests = Vec::new();
    let all = &mut digests;
    pool.in_place_scope(|scope| {
        scope.spawn(move |_| {
            let each = tensors.par_iter();
            *all = each
                .map_with(read, |read, info| hash(gguf, info, read))
                .collect();
        });
        for bytes in reads {
            done += bytes;
            progress(done, total);
        }
    });
    digests
}

/// Hashes a tensor and tells `read` of each piece's bytes.
fn hash(gguf: &Gguf, info: &TensorInfo, read: &mpsc::Sender<u64>) -> Digest {
    use sha2::Digest as _;
    let mut hash = sha2::Sha256::new();
    // Some milliseconds of work between reports.
    for piece in gguf.data(info).chunks(4 << 20) {
        hash.update(piece);
        gguf.release(piece);
        // Who listens listens to the end.
        let _ = read.send(piece.len() as u64);
    }
    Digest(hash.finalize().into())
}

/// Puts the keys of all maps into the order of their encodings' bytes. All keys are short texts,
/// whose encoding begins with the length.
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
