//! What this machine compares when it takes over from hosts: the rows that they returned with the
//! rows that it computes (`specs/receipts.md` 4).

use std::collections::BTreeSet;
use std::sync::Arc;

use hearthnet_bus::NodeId;
use hearthnet_files::BoundaryDtype;
use hearthnet_transport::Want;

use super::ShardedBackend;
use super::audit::{Candidate, MAX_BYTES};
use super::stream::Hop;
use crate::hosts::health::{FailureKind, SharedHealth};
use crate::hosts::receipts::StreamReceipts;

/// Answers of the hosts of the last layers, for this machine that computes all layers again.
pub(crate) struct TakeOver {
    /// Hosts of the route.
    hosts: BTreeSet<NodeId>,
    health: SharedHealth,
    /// Streams with the last layers, each with its host and whether it ran all layers.
    streams: Vec<(NodeId, bool, Arc<StreamReceipts>)>,
    /// All spans of the call.
    candidate: Option<Candidate>,
    boundary: BoundaryDtype,
    /// Values of the last row, if hosts return only that of a call.
    pub(crate) last_row: Option<usize>,
}

impl ShardedBackend {
    /// Ends the call on hosts. Returns what this machine can compare when it takes over; `None` if
    /// a host is not exact.
    pub(crate) fn take_over(&mut self) -> Option<TakeOver> {
        let model = &self.model;
        let values = self.pipeline.submitted_length() as usize * model.rows.width as usize;
        let is_exact = self.hops.iter().all(|hop| hop.receipts.is_some());
        if self.settings.audit_share <= 0.0 || values > MAX_BYTES / size_of::<f32>() || !is_exact {
            return None;
        }
        let is_last = |layers: (u32, u32)| layers.1 + 1 == model.hosted.end;
        let before = self.replaced.iter();
        let before = before.map(|span| (span.host, span.layers, Some(&span.receipts)));
        let now = self.hops.iter();
        let now = now.map(|hop| {
            (
                hop.node(),
                (hop.span.lo, hop.span.hi),
                hop.receipts.as_ref(),
            )
        });
        let streams = before.chain(now).filter(|(_, layers, _)| is_last(*layers));
        let streams = streams.filter_map(|(host, layers, receipts)| {
            Some((host, layers.0 == model.hosted.start, Arc::clone(receipts?)))
        });
        let streams = streams.collect();
        let (boundary, width, back) = (model.boundary, model.rows.width, model.back());
        Some(TakeOver {
            hosts: self.hops.iter().map(Hop::node).collect(),
            health: self.health.clone(),
            streams,
            candidate: self.candidate(true),
            boundary,
            last_row: (back == Want::Last).then_some(width as usize),
        })
    }
}

impl TakeOver {
    /// Compares with all rows that this machine computed, from position 0 on. This machine is right.
    /// The spans are then offered for an audit, which finds the proof against a host.
    pub(crate) fn compare(&mut self, out: &[f32]) {
        let mut rows = Vec::new();
        self.boundary.encode(out, &mut rows);
        for (host, ran_all, receipts) in &self.streams {
            match receipts.compare(0, &rows) {
                true => {}
                false if *ran_all => self.health.failed(host, FailureKind::Corruption),
                // Any host before the last one may have been wrong.
                false => {
                    for host in &self.hosts {
                        self.health.failed(host, FailureKind::Disputed);
                    }
                    let spans = self.candidate.iter().flat_map(|all| &all.spans);
                    spans.for_each(|span| span.receipts.suspect());
                }
            }
        }
        if let Some(candidate) = self.candidate.take() {
            candidate.offer();
        }
    }
}
