//! Model file: container, family, hyperparameters and tensors, checked against one another.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rayon::prelude::*;

use crate::blocks::{WeightType, all_finite};
use crate::boundary::BoundaryDtype;
use crate::error::ModelError;
use crate::families::{
    EMBEDDING, EMBEDDING_NORM, EMBEDDING_NORM_BIAS, Family, OUTPUT, OUTPUT_NORM,
    PER_LAYER_EMBEDDING, PER_LAYER_PROJECTION, PER_LAYER_PROJECTION_NORM, POSITION_EMBEDDING,
    PROJECTION_DOWN, PROJECTION_UP, Rule, TYPE_EMBEDDING, in_block, is_vector, shared_tensors,
};
use crate::gguf::{Gguf, SPLIT_COUNT, TensorInfo, TensorType};
use crate::pooling::Pooling;
use crate::spec::{CacheDtype, Formats, LayerTensor, ModelSpec, SpecError};
use crate::stamp::{Stamp, stamp};
use crate::tokenizer_parts::TOKENS;

/// Name of a part's file in its folder.
pub const PART_FILE: &str = "model.gguf";

/// Store of a file with holes. A hole reads as zeros, so the file is read only where the store
/// holds it.
pub(crate) trait Holdings: fmt::Debug + Send + Sync {
    /// Canonical encoding of the model's manifest.
    fn manifest(&self) -> &[u8];

    /// Whether all bytes of the tensor are held.
    fn holds(&self, tensor: &TensorInfo) -> bool;

    /// Whether `data` has the tensor's SHA-256 of the manifest. Otherwise the damaged pieces of the
    /// tensor are no longer held.
    fn is_genuine(&self, tensor: &TensorInfo, data: &[u8]) -> bool;

    /// Name of the first of these tensors of which a piece was given up, by any process, since the
    /// file was opened.
    fn given_up(&self, tensors: &[&TensorInfo]) -> Option<String>;

    /// Hashes all that is held. Damaged pieces are no longer held; returns the name of the first
    /// damaged tensor. `progress` receives the bytes done and the total.
    fn verify(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<Option<String>, ModelError>;
}

/// Part that a file belongs to.
#[derive(Debug)]
struct PartOf {
    holdings: Arc<dyn Holdings>,
    /// Names of the tensors that were hashed since the file was opened.
    genuine: Mutex<BTreeSet<String>>,
}

/// Folder of the part that a file belongs to, by its path:
/// `<64 hexadecimal digits>/model.gguf`.
pub fn part_folder(path: &Path) -> Option<PathBuf> {
    // A link elsewhere leads to the same file.
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let folder = path.parent()?;
    let name = folder.file_name()?.to_str()?;
    let is_id = name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
    (path.file_name()? == PART_FILE && is_id).then(|| folder.to_owned())
}

/// Model that can be run. The file has exactly the tensors of its family, in the shapes that the
/// hyperparameters imply, and in types that the engine computes with.
#[derive(Debug)]
pub struct ModelFile {
    path: Option<PathBuf>,
    /// State of the file when it was opened.
    stamp: Option<Stamp>,
    gguf: Gguf,
    family: &'static Family,
    spec: ModelSpec,
    /// Boundary dtype of the file; `spec` may override it.
    boundary: BoundaryDtype,
    pooling: Pooling,
    /// `None` for a whole file.
    part: Option<PartOf>,
}

/// Data of a tensor, borrowed from the file.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    pub name: &'a str,
    pub dtype: TensorType,
    /// Lengths of the whole tensor, one to three, row length first.
    pub dims: &'a [u64],
    /// [`rows`](Self::rows) rows of [`cols`](Self::cols) values.
    pub bytes: &'a [u8],
    rows: usize,
}

impl<'a> TensorView<'a> {
    /// Values per row (input length of a matrix).
    pub fn cols(&self) -> usize {
        // The data is in memory, so its lengths fit usize.
        self.dims.first().map_or(0, |&cols| cols as usize)
    }

    /// Number of rows (output length of a matrix); 1 for a vector.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Whether no weight is NaN or infinite. True for types that the engine does not compute with.
    pub fn is_finite(&self) -> bool {
        WeightType::of(self.dtype).is_none_or(|ty| all_finite(ty, self.bytes))
    }

    /// Splits the rows into `count` equal parts, in order, such as the matrices of experts.
    /// Remaining rows belong to no part.
    pub fn parts(&self, count: usize) -> Vec<TensorView<'a>> {
        let count = count.clamp(1, self.rows.max(1));
        let bytes = self.bytes.len() / self.rows.max(1) * (self.rows / count);
        let part = |bytes| Self {
            bytes,
            rows: self.rows / count,
            ..*self
        };
        let parts = self.bytes.chunks_exact(bytes.max(1));
        parts.take(count).map(part).collect()
    }
}

impl ModelFile {
    /// Maps and checks a GGUF file of a whole model, or the files of a split one, by the first. [`open_model`](crate::part::open_model) opens
    /// the files of parts as well.
    ///
    /// # Errors
    /// See [`ModelError`].
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        if part_folder(path).is_some() {
            return Err(ModelError::Part(
                "the file is a part of a model and cannot be read as a whole one: name the adopted model"
                    .to_owned(),
            ));
        }
        Self::open_mapped(path)
    }

    /// Maps and checks the file of a part. `cache` is the format that the checked manifest states.
    pub(crate) fn open_part(
        path: &Path,
        holdings: Arc<dyn Holdings>,
        cache: CacheDtype,
    ) -> Result<Self, ModelError> {
        let mut model = Self::open_mapped(path)?;
        model.spec.attention.cache = cache;
        model.part = Some(PartOf {
            holdings,
            genuine: Mutex::default(),
        });
        Ok(model)
    }

    fn open_mapped(path: &Path) -> Result<Self, ModelError> {
        // Taken before the file is opened, so that a replacement in between is noticed.
        let stamp = stamp(path);
        let mut model = Self::from_gguf(Gguf::open(path)?)?;
        model.path = Some(path.to_owned());
        model.stamp = stamp;
        Ok(model)
    }

    /// Checks an opened GGUF file.
    ///
    /// # Errors
    /// See [`ModelError`].
    pub fn from_gguf(gguf: Gguf) -> Result<Self, ModelError> {
        // A joined file has no such key.
        if let Some(count) = gguf.u32(SPLIT_COUNT)?.filter(|count| *count > 1) {
            return Err(ModelError::Split(count));
        }
        let family = Family::of(&gguf)?;
        let spec = family.spec(&gguf)?;
        let pooling = Pooling::of(&gguf, family.architecture)?;
        check_vocabulary(&gguf, &spec)?;
        check_tensors(&gguf, family, &spec)?;
        Ok(Self {
            path: None,
            stamp: None,
            gguf,
            family,
            boundary: spec.boundary,
            pooling,
            spec,
            part: None,
        })
    }

    /// Store of the part that the file belongs to.
    pub(crate) fn holdings(&self) -> Option<&dyn Holdings> {
        self.part.as_ref().map(|part| &*part.holdings)
    }

    /// Whether all bytes of the tensor are in the file. True for the file of a whole model.
    pub(crate) fn holds(&self, tensor: &TensorInfo) -> bool {
        self.holdings().is_none_or(|part| part.holds(tensor))
    }

    /// Notes that a tensor's data was found to be that of the manifest.
    pub(crate) fn set_genuine(&self, tensor: &TensorInfo) {
        if let Some(part) = &self.part {
            part.genuine.lock().insert(tensor.name.clone());
        }
    }

    /// Checks that a tensor may be read: it is held and, the first time, has its SHA-256.
    fn check_held(&self, tensor: &TensorInfo) -> Result<(), ModelError> {
        let Some(part) = &self.part else {
            return Ok(());
        };
        if !part.holdings.holds(tensor) {
            return Err(ModelError::NotHeld(tensor.name.clone()));
        }
        if part.genuine.lock().contains(&tensor.name) {
            return Ok(());
        }
        if !part.holdings.is_genuine(tensor, self.gguf.data(tensor)) {
            return Err(ModelError::Damaged(tensor.name.clone()));
        }
        self.set_genuine(tensor);
        Ok(())
    }

    /// Checks that these tensors are held after their data was copied. A store withdraws the claim
    /// of a piece before it frees the bytes, so a copy that was made before this check has no zeros
    /// of a hole. (Nothing fetches a piece again within such a copy.)
    ///
    /// # Errors
    /// [`ModelError::NotHeld`].
    pub fn check_copied<'a>(
        &self,
        tensors: impl Iterator<Item = &'a TensorInfo>,
    ) -> Result<(), ModelError> {
        let Some(part) = &self.part else {
            return Ok(());
        };
        let tensors: Vec<&TensorInfo> = tensors.collect();
        match part.holdings.given_up(&tensors) {
            Some(name) => Err(ModelError::NotHeld(name)),
            None => Ok(()),
        }
    }

    /// Whether the file has the tensors of blocks `lo..=hi`, and those that all blocks share. A
    /// whole file has them if it has the blocks.
    pub fn holds_layers(&self, lo: u32, hi: u32) -> bool {
        lo <= hi
            && hi < self.spec.layers
            && self.shared_tensors().all(|info| self.holds(info))
            && (lo..=hi).all(|layer| self.layer_tensors(layer).all(|info| self.holds(info)))
    }

    /// Whether the file has the tensors outside the blocks that a caller needs.
    pub fn holds_head(&self) -> bool {
        self.head_tensors().all(|info| self.holds(info))
    }

    /// Whether the file has all tensors of the model.
    pub fn is_whole(&self) -> bool {
        self.gguf.tensors().iter().all(|info| self.holds(info))
    }

    /// Ranges of blocks in the file: first and last, both inclusive.
    pub fn held_layers(&self) -> Vec<(u32, u32)> {
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        for layer in (0..self.spec.layers).filter(|&layer| self.holds_layers(layer, layer)) {
            match ranges.last_mut() {
                Some((_, hi)) if *hi + 1 == layer => *hi = layer,
                _ => ranges.push((layer, layer)),
            }
        }
        ranges
    }

    /// The same model with another boundary dtype, for debugging. Its weights id is another one.
    #[must_use]
    pub fn with_boundary(mut self, boundary: BoundaryDtype) -> Self {
        self.spec.boundary = boundary;
        self
    }

    /// The same model with another format of keys and values. Its weights id is another one. A part
    /// keeps the format of its adoption.
    ///
    /// # Errors
    /// [`SpecError`] if the widths of heads do not fit the format.
    pub fn with_cache(mut self, cache: CacheDtype) -> Result<Self, SpecError> {
        if self.part.is_none() {
            self.spec.attention.cache = cache;
            self.spec.check()?;
        }
        Ok(self)
    }

    /// The same model with the formats of another spec, for example of a checked manifest.
    #[must_use]
    pub fn with_formats(mut self, formats: Formats) -> Self {
        self.spec.boundary = formats.boundary;
        self.spec.attention.cache = formats.cache;
        self
    }

    /// Hyperparameters as the file has them.
    pub(crate) fn stored_spec(&self) -> ModelSpec {
        let mut spec = self.spec.clone();
        spec.boundary = self.boundary;
        spec.attention.cache = CacheDtype::F16;
        spec
    }

    /// Path of the file, if it was opened from one.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Whether the file at [`Self::path`] was replaced, changed or removed since it was opened.
    /// This value keeps the old contents if it was replaced. A part's file is only replaced when it
    /// is removed: fetched pieces change it in place.
    pub fn is_replaced(&self) -> bool {
        let path = self.path.as_deref();
        if self.part.is_some() {
            return path.is_some_and(|path| !path.exists());
        }
        path.is_some_and(|path| match (&self.stamp, stamp(path)) {
            (Some(then), Some(now)) => !then.has_contents_of(&now),
            _ => true,
        })
    }

    /// Modification time of the file when it was opened, since 1970-01-01 UTC.
    pub fn modified(&self) -> Option<Duration> {
        self.stamp.as_ref().map(Stamp::modified)
    }

    /// Container, for metadata such as the tokenizer's.
    pub fn gguf(&self) -> &Gguf {
        &self.gguf
    }

    pub fn family(&self) -> &'static Family {
        self.family
    }

    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Hidden states of which the vector of a text is made.
    pub fn pooling(&self) -> Pooling {
        self.pooling
    }

    /// The tensor of that name. In a part's file it is hashed at the first call.
    ///
    /// # Errors
    /// [`ModelError::MissingTensor`] if there is none; in a part's file [`ModelError::NotHeld`] and
    /// [`ModelError::Damaged`].
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>, ModelError> {
        let info = self.gguf.tensor(name).ok_or_else(|| self.missing(name))?;
        self.check_held(info)?;
        Ok(TensorView {
            name: &info.name,
            dtype: info.dtype,
            dims: &info.dims,
            bytes: self.gguf.data(info),
            // The data is in memory, so its lengths fit usize.
            rows: info.dims.iter().skip(1).map(|&dim| dim as usize).product(),
        })
    }

    /// Tensor of block `layer`, counted from 0.
    ///
    /// # Errors
    /// [`ModelError::MissingTensor`] if the block does not exist, or the family has no such tensor.
    pub fn layer_tensor(
        &self,
        layer: u32,
        which: LayerTensor,
    ) -> Result<TensorView<'_>, ModelError> {
        match self.rules(layer).find(|rule| rule.tensor == which) {
            Some(rule) => self.tensor(&rule.full_name(layer)),
            None => Err(self.missing(&format!("blk.{layer}.{which:?}"))),
        }
    }

    /// Tensors of block `layer` in order of use; empty if there is no such block.
    pub fn layer_tensors(&self, layer: u32) -> impl Iterator<Item = &TensorInfo> {
        self.rules(layer)
            .filter_map(move |rule| self.gguf.tensor(&rule.full_name(layer)))
    }

    /// Whether block `layer` has this tensor.
    pub fn has(&self, layer: u32, which: LayerTensor) -> bool {
        self.rules(layer).any(|rule| rule.tensor == which)
    }

    fn rules(&self, layer: u32) -> impl Iterator<Item = &'static Rule> {
        self.family.rules(self.spec.block(layer))
    }

    /// Tensors shared by all blocks: the RoPE factors of some models.
    pub fn shared_tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        let names = shared_tensors(&self.spec).iter();
        names.filter_map(|name| self.gguf.tensor(name))
    }

    /// Tensors outside the blocks: embeddings, norms, the output matrix if it is separate, and the
    /// matrices behind a pooled state.
    pub fn head_tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        let plain = [EMBEDDING, OUTPUT_NORM, EMBEDDING_NORM, OUTPUT];
        let per_layer = [
            PER_LAYER_EMBEDDING,
            PER_LAYER_PROJECTION,
            PER_LAYER_PROJECTION_NORM,
        ];
        let encoder = [
            POSITION_EMBEDDING,
            TYPE_EMBEDDING,
            EMBEDDING_NORM_BIAS,
            PROJECTION_UP,
            PROJECTION_DOWN,
        ];
        let names = plain.into_iter().chain(per_layer).chain(encoder);
        names.filter_map(|name| self.gguf.tensor(name))
    }

    /// Bytes of block `layer` in the file.
    pub fn layer_bytes(&self, layer: u32) -> u64 {
        self.layer_tensors(layer).map(|info| info.bytes).sum()
    }

    /// Bytes of the tensors outside the blocks.
    pub fn head_bytes(&self) -> u64 {
        self.head_tensors().map(|info| info.bytes).sum()
    }

    /// Name of a tensor that holds a NaN or an infinity, if there is one. Reads the whole file on
    /// all processors; of a part, the sound tensors that it holds. `progress` receives the tensors done and the total.
    pub fn not_finite(&self, progress: &mut dyn FnMut(u64, u64)) -> Option<&str> {
        let tensors = self.gguf.tensors();
        let mut done = 0;
        // Enough tensors to keep all processors busy between two reports.
        for some in tensors.chunks(64) {
            progress(done, tensors.len() as u64);
            let broken = some.par_iter().find_first(|info| {
                let view = self.tensor(&info.name);
                let broken = view.is_ok_and(|view| !view.is_finite());
                self.gguf.release(self.gguf.data(info));
                broken
            });
            if let Some(info) = broken {
                return Some(&info.name);
            }
            done += some.len() as u64;
        }
        None
    }

    fn missing(&self, name: &str) -> ModelError {
        ModelError::MissingTensor {
            name: name.to_owned(),
            architecture: self.family.architecture,
        }
    }
}

/// Checks that every token has a row in the embedding and in the output matrix. Rows beyond the
/// tokens are padding, which many models have.
fn check_vocabulary(gguf: &Gguf, spec: &ModelSpec) -> Result<(), ModelError> {
    let matrices = [EMBEDDING, OUTPUT].into_iter();
    for info in matrices.filter_map(|name| gguf.tensor(name)) {
        let rows = info.dims.get(1).copied().unwrap_or(1);
        if rows != u64::from(spec.vocab) {
            return Err(ModelError::Vocabulary {
                name: info.name.clone(),
                rows,
                wanted: u64::from(spec.vocab),
                what: "rows, as its hyperparameters say",
            });
        }
        let tokens = gguf.get(TOKENS).and_then(|value| value.as_array());
        if let Some(tokens) = tokens.map(|tokens| tokens.len() as u64)
            && tokens > rows
        {
            return Err(ModelError::Vocabulary {
                name: info.name.clone(),
                rows,
                wanted: tokens,
                what: "tokens",
            });
        }
    }
    Ok(())
}

fn check_tensors(gguf: &Gguf, family: &'static Family, spec: &ModelSpec) -> Result<(), ModelError> {
    let mut known = BTreeSet::new();
    // A hostile layer count ends at the first missing block.
    for (name, expected) in family.tensors(spec) {
        let Some(info) = gguf.tensor(&name) else {
            return Err(ModelError::MissingTensor {
                name,
                architecture: family.architecture,
            });
        };
        if info.dims != expected && info.dims != significant(&expected) {
            return Err(ModelError::TensorShape {
                name,
                expected,
                found: info.dims.clone(),
            });
        }
        // Converters store vectors as F32.
        let vector = is_vector(&name, expected.len());
        let supported = match info.dtype {
            dtype if vector && dtype != TensorType::F32 => Some("F32".to_owned()),
            _ if !info.dtype.is_supported() => Some(TensorType::names(TensorType::supported())),
            _ => None,
        };
        if let Some(supported) = supported {
            return Err(ModelError::TensorType {
                name,
                dtype: info.dtype,
                supported,
            });
        }
        known.insert(name);
    }
    match gguf
        .tensors()
        .iter()
        .find(|info| !known.contains(&info.name) && !is_unused(&info.name, spec))
    {
        None => Ok(()),
        Some(info) => Err(ModelError::Unsupported {
            what: format!("tensor {:?}", info.name),
            architecture: family.architecture,
        }),
    }
}

/// Lengths without those of 1 at the end, which programs that quantise files omit.
fn significant(dims: &[u64]) -> &[u64] {
    let ones = dims.iter().rev().take_while(|length| **length == 1).count();
    &dims[..dims.len() - ones.min(dims.len().saturating_sub(1))]
}

/// Whether nothing uses a tensor that files have: keys and values of a block that uses those of
/// another one.
fn is_unused(name: &str, spec: &ModelSpec) -> bool {
    let Some((layer, rest)) = in_block(name) else {
        return false;
    };
    let own = ["attn_k.weight", "attn_v.weight", "attn_k_norm.weight"].contains(&rest);
    let layer = layer
        .parse()
        .ok()
        .filter(|layer| own && *layer < spec.layers);
    layer.is_some_and(|layer| spec.block(layer).keys_of != layer)
}
