//! Weights that several kinds of layers have.

use hearthnet_engine::layer::Ffn;

use crate::{Buffer, Gpu, GpuLoadError, Matrix};

/// Steps between the output of a branch and the residual stream.
pub(super) struct BranchEnd {
    pub(super) bias: Option<Buffer>,
    pub(super) norm: Option<Buffer>,
    /// LayerNorm of the sum: weights and bias.
    pub(super) sum_norm: Option<(Buffer, Buffer)>,
}

pub(super) enum CardFfn {
    Gated { gate: Matrix, up: Matrix },
    Ungated { up: Matrix, bias: Option<Buffer> },
}

impl CardFfn {
    pub(super) fn upload(gpu: &Gpu, ffn: &Ffn) -> Result<Self, GpuLoadError> {
        Ok(match ffn {
            Ffn::Split { gate, up } => Self::Gated {
                gate: gpu.matrix(gate)?,
                up: gpu.matrix(up)?,
            },
            Ffn::Ungated { up, bias } => Self::Ungated {
                up: gpu.matrix(up)?,
                bias: bias.as_ref().map(|bias| gpu.upload_f32(bias)).transpose()?,
            },
            Ffn::Fused(_) => {
                return Err(GpuLoadError::unsupported(
                    "alternating panels are not computed",
                ));
            }
        })
    }

    /// Matrices that read the input of the feed-forward layer.
    pub(super) fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        let (first, second) = match self {
            Self::Gated { gate, up } => (gate, Some(up)),
            Self::Ungated { up, .. } => (up, None),
        };
        std::iter::once(first).chain(second)
    }
}
