//! Model file: container, family, hyperparameters and tensors, checked against one another.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use crate::blocks::{WeightType, all_finite};
use crate::boundary::BoundaryDtype;
use crate::error::ModelError;
use crate::families::{EMBEDDING, Family, OUTPUT, OUTPUT_NORM, Rule, shared_tensors};
use crate::gguf::{Gguf, TensorInfo, TensorType};
use crate::spec::{LayerTensor, ModelSpec};
use crate::stamp::{Stamp, stamp};

/// Number of files of a split model.
const SPLIT: &str = "split.count";

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
    /// Maps and checks a GGUF file.
    ///
    /// # Errors
    /// See [`ModelError`].
    pub fn open(path: &Path) -> Result<Self, ModelError> {
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
        // Parts after the first have no other metadata.
        if let Some(count) = gguf.u32(SPLIT)?.filter(|count| *count > 1) {
            return Err(ModelError::Split(count));
        }
        let family = Family::of(&gguf)?;
        let spec = family.spec(&gguf)?;
        check_tensors(&gguf, family, &spec)?;
        Ok(Self {
            path: None,
            stamp: None,
            gguf,
            family,
            boundary: spec.boundary,
            spec,
        })
    }

    /// The same model with another boundary dtype, for debugging. Its weights id is another one.
    #[must_use]
    pub fn with_boundary(mut self, boundary: BoundaryDtype) -> Self {
        self.spec.boundary = boundary;
        self
    }

    /// Hyperparameters as the file has them.
    pub(crate) fn stored_spec(&self) -> ModelSpec {
        ModelSpec {
            boundary: self.boundary,
            ..self.spec.clone()
        }
    }

    /// Path of the file, if it was opened from one.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Whether the file at [`Self::path`] was replaced, changed or removed since it was opened.
    /// This value keeps the old contents if it was replaced.
    pub fn is_replaced(&self) -> bool {
        let path = self.path.as_deref();
        path.is_some_and(|path| self.stamp.is_none() || stamp(path) != self.stamp)
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

    /// The tensor of that name.
    ///
    /// # Errors
    /// [`ModelError::MissingTensor`] if there is none.
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>, ModelError> {
        let info = self.gguf.tensor(name).ok_or_else(|| self.missing(name))?;
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

    /// Tensors outside the blocks: embedding, last norm, and the output matrix if it is separate.
    pub fn head_tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        [EMBEDDING, OUTPUT_NORM, OUTPUT]
            .into_iter()
            .filter_map(|name| self.gguf.tensor(name))
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
    /// all processors. `progress` receives the tensors done and the total.
    pub fn not_finite(&self, progress: &mut dyn FnMut(u64, u64)) -> Option<&str> {
        let tensors = self.gguf.tensors();
        let mut done = 0;
        // Enough tensors to keep all processors busy between two reports.
        for some in tensors.chunks(64) {
            progress(done, tensors.len() as u64);
            let broken = some.par_iter().find_first(|info| {
                let view = self.tensor(&info.name);
                let finite = view.is_ok_and(|view| view.is_finite());
                self.gguf.release(self.gguf.data(info));
                !finite
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
        if info.dims != expected {
            return Err(ModelError::TensorShape {
                name,
                expected,
                found: info.dims.clone(),
            });
        }
        // Vectors are small and used in full precision, as are the stacked biases of experts.
        // Converters store them as F32.
        let vector = info.dims.len() == 1 || name.ends_with(".bias");
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
        .find(|info| !known.contains(&info.name))
    {
        None => Ok(()),
        Some(info) => Err(ModelError::Unsupported {
            what: format!("tensor {:?}", info.name),
            architecture: family.architecture,
        }),
    }
}
