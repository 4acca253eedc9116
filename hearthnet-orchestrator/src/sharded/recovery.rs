//! Other hosts in the place of one that has failed.

use std::collections::VecDeque;
use std::time::Instant;

use hearthnet_bus::Descriptor;

use super::ShardedBackend;
use super::stream::{Hop, Trouble};
use crate::backend::{Notice, Run};
use crate::error::ChatError;
use crate::hosts::RoutedSpan;

/// A replaced host, until the answer goes on.
pub(super) struct Recovery {
    shard_id: String,
    host: String,
    code: String,
    replacements: Vec<String>,
    replayed: u32,
    since: Instant,
}

impl ShardedBackend {
    /// Puts other hosts in the place of one that has failed.
    pub(super) fn recover(&mut self, trouble: Trouble, run: &mut Run<'_>) -> Result<(), ChatError> {
        let mut waiting = VecDeque::from([trouble]);
        while let Some(trouble) = waiting.pop_front() {
            let Some(hop) = self.hops.get_mut(trouble.span) else {
                continue;
            };
            if run.cancel.is_cancelled() {
                return Err(ChatError::Cancelled);
            }
            // The request itself is at fault: another host would say the same.
            if matches!(trouble.error, ChatError::BadRequest(_)) {
                return Err(trouble.error);
            }
            let since = Instant::now();
            let (lo, hi) = (hop.span.lo, hop.span.hi);
            let host = hop.node().to_owned();
            let shard_id = Descriptor::shard_id(&self.model.model_id, lo, hi);
            let mut excluded = self.excluded.clone();
            excluded.insert(host.clone());
            let found = self.source.route(lo..=hi, &excluded);
            if trouble.may_stay && found.is_err() {
                hop.indulged = true;
                continue;
            }
            tracing::warn!(%shard_id, code = trouble.code, "a host has failed: {}", trouble.error);
            (run.notify)(Notice::Degraded {
                shard_id: shard_id.clone(),
                host: host.clone(),
                code: trouble.code.clone(),
            });
            self.excluded = excluded;
            self.failures += 1;
            let gives_up = self.settings.give_up_after;
            if gives_up.is_some_and(|limit| self.failures >= limit) {
                return Err(trouble.error);
            }
            // What went wrong explains more than the hole that it leaves.
            let route = found.map_err(|_| trouble.error)?;
            self.recoveries.push(Recovery {
                shard_id,
                host,
                code: trouble.code,
                replacements: route
                    .iter()
                    .map(|span| span.link.descriptor().host.clone())
                    .collect(),
                replayed: self.pipeline.length(),
                since,
            });
            waiting.extend(self.replace(trouble.span, route));
        }
        Ok(())
    }

    /// Opens streams for the spans that take over; returns what went wrong at once.
    fn replace(&mut self, span: usize, route: Vec<RoutedSpan>) -> Option<Trouble> {
        let count = route.len();
        let reopened = self.pipeline.replace(span, count);
        let fresh: Vec<Hop> = route
            .into_iter()
            .enumerate()
            .map(|(offset, routed)| self.hop(span + offset, routed))
            .collect();
        let old: Vec<Hop> = self.hops.splice(span..=span, fresh).collect();
        old.iter().for_each(|hop| self.release(hop));
        // Those before it that run again begin a new life on the same host.
        for index in reopened.start..span {
            let Some(routed) = self.hops.get(index).map(|hop| hop.span.clone()) else {
                continue;
            };
            let fresh = self.hop(index, routed);
            if let Some(place) = self.hops.get_mut(index) {
                let old = std::mem::replace(place, fresh);
                self.release(&old);
            }
        }
        reopened
            .filter_map(|index| self.open_stream(index).err())
            .next()
    }

    pub(super) fn report_recoveries(&mut self, run: &mut Run<'_>) {
        for recovery in self.recoveries.drain(..) {
            metrics::counter!("distributed_inference_failovers_total").increment(1);
            (run.notify)(Notice::Failover {
                shard_id: recovery.shard_id,
                host: Some(recovery.host),
                code: recovery.code,
                replacements: recovery.replacements,
                replayed: recovery.replayed,
                recovery_ms: recovery.since.elapsed().as_secs_f64() * 1e3,
            });
        }
    }
}
