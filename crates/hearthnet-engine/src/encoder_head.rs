//! Tensors outside the blocks that encoders have beside the others.

use hearthnet_files::families::{
    EMBEDDING_NORM, EMBEDDING_NORM_BIAS, POSITION_EMBEDDING, PROJECTION_DOWN, PROJECTION_UP,
    TYPE_EMBEDDING,
};
use hearthnet_files::spec::EncoderSpec;
use hearthnet_files::{ModelError, ModelFile, TensorView};

use crate::error::LoadError;
use crate::kernels::{Kernels, Packed};
use crate::layer::LayerNorm;
use crate::weights::Loader;

pub(crate) struct EncoderHead {
    positions: Option<Packed>,
    /// Embedding of the first token type.
    token_type: Option<Vec<f32>>,
    norm: Option<LayerNorm>,
    /// Matrices behind the pooled state.
    pub(crate) projection: Option<(Packed, Packed)>,
}

/// Tensors of an [`EncoderHead`] in a file.
pub(crate) struct EncoderTensors<'a> {
    positions: Option<TensorView<'a>>,
    types: Option<TensorView<'a>>,
    norm: Option<[TensorView<'a>; 2]>,
    projection: Option<[TensorView<'a>; 2]>,
}

impl<'a> EncoderTensors<'a> {
    pub(crate) fn of(file: &'a ModelFile) -> Result<Self, ModelError> {
        let EncoderSpec {
            layer_norm,
            positions,
            token_types,
            projection,
            ..
        } = file.spec().encoder.unwrap_or_default();
        let both = |wanted: bool, one, other| match wanted {
            true => Ok::<_, ModelError>(Some([file.tensor(one)?, file.tensor(other)?])),
            false => Ok(None),
        };
        let single = |wanted: bool, name| wanted.then(|| file.tensor(name)).transpose();
        Ok(Self {
            positions: single(positions, POSITION_EMBEDDING)?,
            types: single(token_types > 0, TYPE_EMBEDDING)?,
            norm: both(layer_norm, EMBEDDING_NORM, EMBEDDING_NORM_BIAS)?,
            projection: both(projection.is_some(), PROJECTION_UP, PROJECTION_DOWN)?,
        })
    }

    pub(crate) fn matrices(&self) -> impl Iterator<Item = &TensorView<'a>> {
        let tables = self.positions.iter().chain(&self.types);
        tables.chain(self.projection.iter().flatten())
    }

    pub(crate) fn load(self, loader: &mut Loader<'_>) -> Result<EncoderHead, LoadError> {
        let positions = self.positions.map(|view| loader.matrix(&view));
        let types = self.types.map(|view| loader.matrix(&view)).transpose()?;
        Ok(EncoderHead {
            positions: positions.transpose()?,
            token_type: types.map(|types| {
                let mut row = vec![0.0; types.cols()];
                types.dequantise_row(0, &mut row);
                row
            }),
            norm: match self.norm {
                Some([weight, bias]) => Some(LayerNorm {
                    weight: loader.vector(&weight)?,
                    bias: loader.vector(&bias)?,
                }),
                None => None,
            },
            projection: match self.projection {
                Some([up, down]) => Some((loader.matrix(&up)?, loader.matrix(&down)?)),
                None => None,
            },
        })
    }
}

impl EncoderHead {
    /// Completes the embedding of the token at a position: section 15 of the specification.
    pub(crate) fn finish_row(&self, kernels: Kernels, position: usize, eps: f32, row: &mut [f32]) {
        let add = |row: &mut [f32], more: &[f32]| {
            row.iter_mut()
                .zip(more)
                .for_each(|(sum, more)| *sum += more);
        };
        if let Some(token_type) = &self.token_type {
            add(row, token_type);
        }
        if let Some(positions) = &self.positions {
            let mut own = vec![0.0; row.len()];
            positions.dequantise_row(position, &mut own);
            add(row, &own);
        }
        if let Some(LayerNorm { weight, bias }) = &self.norm {
            kernels.layer_norm_in_place(row, weight, bias, eps);
        }
    }
}
