//! A span of a call that can be audited, and its claims.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use hearthnet_bus::NodeId;
use hearthnet_bus::receipt::{Claim, Inputs, SignedClaims};

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
