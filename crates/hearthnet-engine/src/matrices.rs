//! Matrices of the tensors of a file.

use hearthnet_files::blocks::WeightType;
use hearthnet_files::spec::{BlockSpec, LayerTensor, ModelSpec};
use hearthnet_files::{ModelError, ModelFile, TensorType, TensorView};

use crate::error::LoadError;
use crate::kernels::{Matrix, PackError, Packed};

/// Memory of the matrices of a layer.
pub(crate) fn layer_bytes(file: &ModelFile, layer: u32) -> Result<usize, LoadError> {
    let mut packed = 0usize;
    let tensors = file.family().rules(file.spec().block(layer));
    for rule in tensors.filter(|rule| rule.is_matrix()) {
        let view = file.layer_tensor(layer, rule.tensor)?;
        for matrix in matrices(file.spec(), &view, rule.tensor) {
            packed = packed.saturating_add(packed_bytes(&matrix)?);
        }
    }
    Ok(packed)
}

/// Splits a tensor into its matrices: those of all experts, gate and up, or a single one.
pub(crate) fn matrices<'a>(
    spec: &ModelSpec,
    view: &TensorView<'a>,
    which: LayerTensor,
) -> Vec<TensorView<'a>> {
    use LayerTensor as T;
    view.parts(match which {
        T::ExpertGate | T::ExpertUp | T::ExpertDown => {
            spec.experts.map_or(1, |experts| experts.count as usize)
        }
        T::ExpertGateUp => spec.experts.map_or(1, |experts| 2 * experts.count as usize),
        T::LatentKeyUp | T::LatentValueUp => spec.heads as usize,
        T::FfnGateUp => 2,
        // The queries of a head, then its gates.
        T::AttnQ if interleaves_gates(spec) => 2 * spec.heads as usize,
        _ => 1,
    })
}

/// Step between the query matrices of two heads in a tensor that may also have gates.
pub(crate) fn gated(block: &BlockSpec<'_>) -> usize {
    1 + usize::from(interleaves_gates(block.model))
}

/// Whether the matrix of the queries has the gates of each head behind its queries.
fn interleaves_gates(spec: &ModelSpec) -> bool {
    spec.attention.output_gate && !spec.attention.gate_matrix
}

pub(crate) fn packed_bytes(view: &TensorView<'_>) -> Result<usize, LoadError> {
    Packed::bytes_for(weight_type(view)?, view.rows(), view.cols())
        .map_err(|source| pack_error(view, source))
}

pub(crate) fn matrix<'a>(view: &TensorView<'a>) -> Result<Matrix<'a>, LoadError> {
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

pub(crate) fn pack_error(view: &TensorView<'_>, source: PackError) -> LoadError {
    LoadError::Pack {
        tensor: view.name.to_owned(),
        source,
    }
}
