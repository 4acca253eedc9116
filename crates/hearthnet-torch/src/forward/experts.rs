//! The feed-forward layer of a mixture of experts.
//!
//! Rows of a batch with the same expert go through its weights together. Experts without rows are
//! not touched.

use tch::{Kind, Tensor};

use super::choose::{Routed, choose};
use super::{Pass, Result, download, upload};
use crate::weights::{Ffn, Linear};

impl Pass<'_> {
    /// `normed` holds normalised fp32 rows.
    pub(super) fn experts(
        &self,
        router: &Linear,
        experts: &[Ffn],
        normed: &Tensor,
    ) -> Result<Tensor> {
        let scores: Vec<f32> = download(&router.apply(normed)?)?;
        let x = normed.f_to_kind(self.kind)?;
        let mut sum = normed.f_zeros_like()?;
        let Some(spec) = &self.spec.experts else {
            return Ok(sum);
        };
        for (expert, Routed { rows, weights }) in choose(&scores, spec) {
            let Some(ffn) = experts.get(expert) else {
                continue;
            };
            let count = rows.len() as i64;
            let rows = upload(&rows, &[count], self.device)?;
            let weights = upload(&weights, &[count, 1], self.device)?;
            let out = self.ffn(ffn, &x.f_index_select(0, &rows)?)?;
            let out = out.f_to_kind(Kind::Float)?.f_mul(&weights)?;
            let _ = sum.f_index_add_(0, &rows, &out)?;
        }
        Ok(sum)
    }
}
