//! Weights of a layer range, repacked for the kernels.

use std::ops::Range;

use super::error::LoadError;
use crate::kernels::{ActForm, Arena, LANES, Matrix, PackError, Packed, WeightType};
use crate::model_file::{ModelFile, TensorView};
use crate::spec::LayerTensor;
use crate::{ModelError, TensorType};

/// One block's weights.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) attn_norm: Vec<f32>,
    pub(super) qkv: Qkv,
    pub(super) attn_output: Packed,
    pub(super) ffn_norm: Vec<f32>,
    pub(super) ffn: Ffn,
    pub(super) ffn_down: Packed,
}

/// Query, key and value matrices: their outputs stand side by side.
#[derive(Debug)]
pub(super) struct Qkv {
    /// One matrix where types and shapes allow it, else three.
    pub(super) parts: Vec<Packed>,
    pub(super) form: ActForm,
}

/// Gate and up matrices.
#[derive(Debug)]
pub(super) enum Ffn {
    /// Interleaved, so that the gate is applied in the same pass.
    Fused(Packed),
    /// Of different types.
    Split {
        /// The gate.
        gate: Packed,
        /// What it is multiplied with.
        up: Packed,
    },
}

impl Qkv {
    /// Outputs of all parts, in groups of 16.
    pub(super) fn panels(&self) -> usize {
        self.parts.iter().map(Packed::panels).sum()
    }
}

impl Ffn {
    pub(super) fn form(&self) -> ActForm {
        match self {
            Self::Fused(both) => ActForm::of([both]),
            Self::Split { gate, up } => ActForm::of([gate, up]),
        }
    }

    /// Outputs of each of the two, in groups of 16.
    pub(super) fn panels(&self) -> usize {
        match self {
            Self::Fused(both) => both.panels(),
            Self::Split { gate, .. } => gate.panels(),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Fused(both) => both.bytes(),
            Self::Split { gate, up } => gate.bytes() + up.bytes(),
        }
    }
}

impl Layer {
    /// Memory that the weights take.
    pub(super) fn bytes(&self) -> usize {
        let norms = size_of_val(&self.attn_norm[..]) + size_of_val(&self.ffn_norm[..]);
        let qkv: usize = self.qkv.parts.iter().map(Packed::bytes).sum();
        norms + qkv + self.attn_output.bytes() + self.ffn.bytes() + self.ffn_down.bytes()
    }
}

/// Reads tensors of a file into an arena of the right size, and lets the file's pages go.
pub(super) struct Loader<'a> {
    file: &'a ModelFile,
    arena: Arena,
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(u64, u64),
}

impl<'a> Loader<'a> {
    /// For matrices that come to `packed` bytes, read from `total` bytes of the file.
    pub(super) fn new(
        file: &'a ModelFile,
        packed: usize,
        total: u64,
        progress: &'a mut dyn FnMut(u64, u64),
    ) -> Result<Self, LoadError> {
        let arena =
            Arena::with_capacity(packed).map_err(|_| LoadError::OutOfMemory { bytes: packed })?;
        progress(0, total);
        Ok(Self {
            file,
            arena,
            done: 0,
            total,
            progress,
        })
    }

    /// The layers of a range that lies in the model.
    pub(super) fn layers(
        file: &'a ModelFile,
        range: Range<u32>,
        progress: &'a mut dyn FnMut(u64, u64),
    ) -> Result<Vec<Layer>, LoadError> {
        let mut packed = 0usize;
        for layer in range.clone() {
            for tensor in MATRICES {
                packed = packed.saturating_add(packed_bytes(&file.layer_tensor(layer, tensor)?)?);
            }
        }
        let total = range.clone().map(|layer| file.layer_bytes(layer)).sum();
        let mut loader = Self::new(file, packed, total, progress)?;
        range.map(|layer| loader.layer(layer)).collect()
    }

    fn layer(&mut self, layer: u32) -> Result<Layer, LoadError> {
        use LayerTensor as T;
        let file = self.file;
        let get = |tensor| file.layer_tensor(layer, tensor);
        let (q, k, v) = (get(T::AttnQ)?, get(T::AttnK)?, get(T::AttnV)?);
        let (gate, up) = (get(T::FfnGate)?, get(T::FfnUp)?);
        Ok(Layer {
            attn_norm: self.vector(&get(T::AttnNorm)?)?,
            qkv: self.qkv([q, k, v])?,
            attn_output: self.matrix(&get(T::AttnOutput)?)?,
            ffn_norm: self.vector(&get(T::FfnNorm)?)?,
            ffn: self.ffn(&gate, &up)?,
            ffn_down: self.matrix(&get(T::FfnDown)?)?,
        })
    }

    fn qkv(&mut self, views: [TensorView<'_>; 3]) -> Result<Qkv, LoadError> {
        let [q, k, v] = &views;
        let same = q.dtype == k.dtype && q.dtype == v.dtype;
        let whole = q.rows().is_multiple_of(LANES) && k.rows().is_multiple_of(LANES);
        let parts = if same && whole {
            let matrices = [matrix(q)?, matrix(k)?, matrix(v)?];
            let packed = Packed::pack_stacked(&mut self.arena, &matrices);
            let packed = packed.map_err(|source| pack_error(q, source))?;
            views.iter().for_each(|view| self.step(view));
            vec![packed]
        } else {
            views
                .iter()
                .map(|view| self.matrix(view))
                .collect::<Result<_, _>>()?
        };
        let form = ActForm::of(&parts);
        Ok(Qkv { parts, form })
    }

    fn ffn(&mut self, gate: &TensorView<'_>, up: &TensorView<'_>) -> Result<Ffn, LoadError> {
        if gate.dtype != up.dtype {
            return Ok(Ffn::Split {
                gate: self.matrix(gate)?,
                up: self.matrix(up)?,
            });
        }
        let both = Packed::pack_gate_up(&mut self.arena, &matrix(gate)?, &matrix(up)?)
            .map_err(|source| pack_error(gate, source))?;
        self.step(gate);
        self.step(up);
        Ok(Ffn::Fused(both))
    }

    /// A matrix by itself.
    pub(super) fn matrix(&mut self, view: &TensorView<'_>) -> Result<Packed, LoadError> {
        let packed = Packed::pack(&mut self.arena, &matrix(view)?)
            .map_err(|source| pack_error(view, source))?;
        self.step(view);
        Ok(packed)
    }

    /// A vector, which is F32 in every model file that was opened.
    pub(super) fn vector(&mut self, view: &TensorView<'_>) -> Result<Vec<f32>, LoadError> {
        if view.dtype != TensorType::F32 {
            return Err(LoadError::Unsupported(format!(
                "{:?} is {}",
                view.name, view.dtype
            )));
        }
        let (values, _) = view.bytes.as_chunks::<4>();
        let values = values
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes))
            .collect();
        self.step(view);
        Ok(values)
    }

    /// A tensor is done.
    fn step(&mut self, view: &TensorView<'_>) {
        if let Some(info) = self.file.gguf().tensor(view.name) {
            self.file.gguf().release(info);
        }
        self.done += view.bytes.len() as u64;
        (self.progress)(self.done, self.total);
    }
}

const MATRICES: [LayerTensor; 7] = [
    LayerTensor::AttnQ,
    LayerTensor::AttnK,
    LayerTensor::AttnV,
    LayerTensor::AttnOutput,
    LayerTensor::FfnGate,
    LayerTensor::FfnUp,
    LayerTensor::FfnDown,
];

/// Memory that a matrix takes when packed.
pub(super) fn packed_bytes(view: &TensorView<'_>) -> Result<usize, LoadError> {
    Packed::bytes_for(weight_type(view)?, view.rows(), view.cols())
        .map_err(|source| pack_error(view, source))
}

fn matrix<'a>(view: &TensorView<'a>) -> Result<Matrix<'a>, LoadError> {
    let weight_type = weight_type(view)?;
    Ok(Matrix {
        weight_type,
        rows: view.rows(),
        cols: view.cols(),
        bytes: view.bytes,
    })
}

fn weight_type(view: &TensorView<'_>) -> Result<WeightType, LoadError> {
    WeightType::of(view.dtype).ok_or_else(|| {
        LoadError::Model(ModelError::TensorType {
            name: view.name.to_owned(),
            dtype: view.dtype,
            supported: TensorType::names(TensorType::supported()),
        })
    })
}

fn pack_error(view: &TensorView<'_>, source: PackError) -> LoadError {
    LoadError::Pack {
        tensor: view.name.to_owned(),
        source,
    }
}
