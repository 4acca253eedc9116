//! A span of a call that can be audited, and its claims.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use hearthnet_bus::NodeId;
use hearthnet_bus::receipt::{Claim, Inputs, SignedClaims};
use hearthnet_engine::{Engine, EngineOptions, Span};
use hearthnet_files::ModelFile;

use crate::error::ChatError;
use crate::hosts::receipts::StreamReceipts;

/// Span of a call that can be audited.
pub(super) struct AuditSpan {
    pub(super) host: NodeId,
    /// First and last layer.
    pub(super) layers: (u32, u32),
    /// Input rows from position 0 on; none if they are not kept.
    pub(super) rows: Vec<Bytes>,
    pub(super) receipts: Arc<StreamReceipts>,
    /// True if the host must sign all its answers now. It need not if its stream goes on, or if the
    /// end of the stream counts as a failure already.
    pub(super) must_sign: bool,
}

/// Runs rows from position 0 on through layers (half-open) on this machine.
pub type RecomputeHere =
    Arc<dyn Fn(Range<u32>, &[f32]) -> Result<Vec<f32>, ChatError> + Send + Sync>;

/// Rows that the engine of [`recompute`] runs at once.
const ROWS: usize = 64;

/// Runs rows from position 0 on through layers (half-open) of a file, with an engine of their own.
///
/// # Errors
/// [`ChatError::Engine`] if the layers cannot be loaded, or the rows not computed.
pub fn recompute(
    file: &ModelFile,
    layers: Range<u32>,
    options: &EngineOptions,
    rows: &[f32],
) -> Result<Vec<f32>, ChatError> {
    let failed = |why: String| ChatError::Engine(format!("an audit failed here: {why}"));
    let engine = Engine::load(file, layers.clone(), options, &mut |_, _| {});
    let mut engine = engine.map_err(|e| failed(e.to_string()))?;
    let seq = engine.open().map_err(|e| failed(e.to_string()))?;
    let (shape, mut out) = (file.spec().row_shape(), rows.to_vec());
    let (values, mut position) = (shape.before(layers.len()), 0);
    for chunk in out.chunks_mut(ROWS * values) {
        let count = u32::try_from(chunk.len() / values).unwrap_or(u32::MAX);
        let ran = engine.forward(&[Span::new(seq, position, count)], chunk);
        ran.map_err(|e| failed(e.to_string()))?;
        position += count;
    }
    shape.keep_outputs(layers.len(), &mut out);
    Ok(out)
}

impl AuditSpan {
    /// Of signed claims, those about the rows that are still there, up to a position, in order.
    pub(super) fn claims(
        &self,
        signed: &[SignedClaims],
        row_bytes: usize,
        most: u32,
    ) -> Vec<Claim> {
        let mut inputs = Inputs::default();
        for rows in &self.rows {
            inputs.extend(inputs.length(), rows, row_bytes);
        }
        let claims = signed.iter().flat_map(|signed| &signed.claims);
        claims
            .filter(|claim| claim.end <= most && inputs.hash(claim.end) == Some(claim.input))
            .copied()
            .collect()
    }
}
