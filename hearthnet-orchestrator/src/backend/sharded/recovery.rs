//! Replacement of hosts that failed, leave or have no room.
//!
//! | cause | used again in this call | counts as a failure | if no other host has the layers |
//! |---|---|---|---|
//! | failed | no | yes | the call ends, or this machine continues |
//! | session lost | yes, [`MAX_RECONNECTS`] times | yes | the caller waits for it, then as above |
//! | slow | no | if another takes over | it stays; the next search is 10 s later |
//! | silent | no | if another takes over | it stays until the health timeout (4 s with fallback) |
//! | leaving | no | no | it stays as long as it can |
//! | not authorised any more | no | no | the call ends, or this machine continues |
//! | convicted | no | no | as above; the hosts behind it run all rows again |
//! | no room for a running sequence, or nothing to fork | yes, after a pause | no | it is asked again |
//! | no room at the start | no | no | the sequence waits (`starting.rs`) |

use std::collections::BTreeSet;
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;
use std::time::Duration;

use hearthnet_bus::flight::Event;
use hearthnet_bus::{Descriptor, NodeId};
use hearthnet_transport::{Code, run_blocking};
use tokio::time::Instant;

use super::failure::{Cause, HopFailure};
use super::stream::Hop;
use super::{ShardedBackend, status};
use crate::Cancel;
use crate::backend::Run;
use crate::backend::events::{Failover, report_event};
use crate::error::ChatError;
use crate::exact::Arithmetics;
use crate::hosts::health::{FailureKind, Standing};
use crate::hosts::{Patience, RoutedSpan, Search};

/// Interval between searches for a replacement of a leaving or silent host.
pub(super) const SEARCH_INTERVAL: Duration = Duration::from_secs(1);
/// Interval between searches for a replacement of a slow host, which still answers.
const SLOW_SEARCH_INTERVAL: Duration = Duration::from_secs(10);

/// Pause between two requests for room on full hosts, before random shortening: first and longest.
/// The first is a few decode steps of the sequences that run there.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// Rows of progress that reset the room timeout. A host that answers one row and
/// preempts the next has no room.
const ROWS_OF_PROGRESS: u32 = 16;
/// Preemptions with fewer rows in between that count as one failure of the host.
const PREEMPTIONS_PER_FAILURE: u32 = 3;
/// Reconnects to a host whose session was lost, with fewer rows in between. The limit protects
/// against a prompt that crashes the host.
const MAX_RECONNECTS: u32 = 3;

/// Replaced spans of a call that are kept for its audit.
const MAX_REPLACED: usize = 8;

impl ShardedBackend {
    /// Replaces the hosts of all failed hops.
    pub(super) async fn settle(&mut self, run: &mut Run<'_>) -> Result<(), ChatError> {
        while let Some(failure) = self.hop_failures.pop_front() {
            // The hop may have been replaced since.
            if let Some(index) = self.hops.iter().position(|hop| hop.id == failure.hop) {
                self.recover(index, failure, run).await?;
            }
        }
        Ok(())
    }

    async fn recover(
        &mut self,
        index: usize,
        mut failure: HopFailure,
        run: &mut Run<'_>,
    ) -> Result<(), ChatError> {
        let Some(hop) = self.hops.get(index) else {
            return Ok(());
        };
        if run.cancel.is_cancelled() {
            return Err(ChatError::Cancelled);
        }
        // The request itself is invalid: every host would refuse it.
        if matches!(failure.error, ChatError::BadRequest(_)) {
            return Err(failure.error);
        }
        let (span, node) = (hop.span.clone(), hop.node());
        let layers = (span.lo, span.hi);
        // Its session was closed for that, or has ended just before.
        let source = self.source.as_ref();
        let is_convicted = source.is_some_and(|source| source.is_convicted(&node));
        if is_convicted {
            failure = hop.hop_failure(Code::CONVICTED, Cause::Unauthorized, |host| {
                ChatError::ShardUnavailable(format!("{host} has signed wrong rows, says a verdict"))
            });
        }
        let mut failover = Failover {
            pipeline: self.name,
            shard_id: hop.shard_id.clone(),
            from: Some(node),
            to: Vec::new(),
            code: failure.code.clone(),
            replayed: 0,
            before: Arithmetics::from_iter([hop.arithmetic().clone()]),
            now: Arithmetics::default(),
            since: Instant::now(),
        };
        if failure.code == Code::PREEMPTED {
            report_event(Event::HostPreempted {
                pipeline: self.name,
                host: node,
                shard: failover.shard_id.as_str().into(),
            });
            let times = self.call.preempted.entry(node).or_default();
            *times += 1;
            if times.is_multiple_of(PREEMPTIONS_PER_FAILURE) {
                self.health.failed(&node, FailureKind::Refused);
            }
        }
        let (route, is_told) = if failure.cause.stays() {
            let (others, none) = (self.others(&span), Patience::None);
            let route = self.find(&span, others, none, run.cancel, &failure.error);
            let route = route.await;
            let late = failure.cause == Cause::Late;
            let Some(route) = route.ok().filter(|to| !late || self.faster(index, to)) else {
                self.postpone_search(index, failure.cause);
                return Ok(());
            };
            self.call.failed_at.get_or_insert(failover.since);
            self.leave(index, &failure, run)?;
            (route, true)
        } else if failure.cause == Cause::Preempted
            && let Some(route) = self.find_room(&span, run.cancel).await?
        {
            let computes = |span: &RoutedSpan| span.link.descriptor.arithmetic.clone();
            let now: Arithmetics = route.iter().map(computes).collect();
            (route, failover.before != now)
        } else {
            self.call.failed_at.get_or_insert(failover.since);
            self.leave(index, &failure, run)?;
            let route = self.find_replacement(&span, &failure, run.cancel).await?;
            (route, true)
        };
        if is_told {
            failover.replayed = self.pipeline.length();
            self.call.recoveries.push((layers, failover));
        }
        match is_convicted {
            true => self.redo(index, route),
            false => self.replace(index, route),
        }
        Ok(())
    }

    /// Sets the time of the next search for a replacement of a host that stays.
    fn postpone_search(&mut self, index: usize, cause: Cause) {
        let Some(hop) = self.hops.get_mut(index) else {
            return;
        };
        let now = Instant::now();
        match cause {
            Cause::Late => hop.retry_search_at = Some(now + SLOW_SEARCH_INTERVAL),
            Cause::Silent => hop.retry_search_at = Some(now + SEARCH_INTERVAL),
            _ => hop.migrate_at = Some(now + SEARCH_INTERVAL),
        }
    }

    /// Excludes a host from this call, notifies the caller, and counts the failure if it is one.
    fn leave(
        &mut self,
        index: usize,
        failure: &HopFailure,
        run: &mut Run<'_>,
    ) -> Result<(), ChatError> {
        let Some(hop) = self.hops.get_mut(index) else {
            return Ok(());
        };
        let (cause, code) = (failure.cause, failure.code.clone());
        let lost = self.call.lost.entry(hop.node()).or_default();
        if cause == Cause::Lost {
            *lost += 1;
            self.call.rows = 0;
        }
        if cause != Cause::Lost || *lost > MAX_RECONNECTS {
            self.call.excluded.insert(hop.node());
        }
        if cause == Cause::NoCapacity {
            let why = || failure.error.to_string();
            self.call.full.get_or_insert_with(why);
        }
        if !cause.is_told() {
            return Ok(());
        }
        let (shard_id, host) = (hop.shard_id.as_str(), hop.node());
        (run.notify)(status("degraded", hop, code.clone()));
        tracing::warn!(%shard_id, %code, "a host has failed: {}", failure.error);
        let kind = match cause {
            Cause::Corrupt => Some(FailureKind::Corruption),
            _ => FailureKind::of_code(&code),
        };
        report_event(Event::HostFailed {
            pipeline: self.name,
            host,
            shard: shard_id.into(),
            code,
        });
        if let Some(kind) = kind {
            self.health.failed(&host, kind);
            hop.has_failed = true;
        }
        if cause == Cause::Unauthorized {
            return Ok(());
        }
        self.call.failures += 1;
        match self.settings.give_up_after {
            // Before the first row, there is nothing that this machine could continue.
            Some(limit) if self.call.failures >= limit && self.running => {
                Err(failure.error.clone())
            }
            _ => Ok(()),
        }
    }

    /// Finds replacements for a host that was left: another host first. If only the session was
    /// lost, the same host may be used again.
    async fn find_replacement(
        &mut self,
        span: &RoutedSpan,
        failure: &HopFailure,
        cancel: &Cancel,
    ) -> Result<Vec<RoutedSpan>, ChatError> {
        let (others, otherwise) = (self.others(span), &failure.error);
        let patience = match failure.cause {
            Cause::NoCapacity => Patience::None,
            // The search already ran while the host was silent.
            _ if failure.code == Code::SILENT => Patience::None,
            _ => self.patience(),
        };
        if failure.cause != Cause::Lost || self.call.excluded.is_superset(&others) {
            return self.find(span, others, patience, cancel, otherwise).await;
        }
        self.find_others_first(span, patience, cancel, otherwise)
            .await
    }

    /// Finds hosts for a span's layers: others at hand, else others or its own.
    async fn find_others_first(
        &mut self,
        span: &RoutedSpan,
        patience: Patience,
        cancel: &Cancel,
        otherwise: &ChatError,
    ) -> Result<Vec<RoutedSpan>, ChatError> {
        let (others, none) = (self.others(span), Patience::None);
        match self.find(span, others, none, cancel, otherwise).await {
            Err(error) if error != ChatError::Cancelled => {
                let exclude = self.call.excluded.clone();
                self.find(span, exclude, patience, cancel, otherwise).await
            }
            found => found,
        }
    }

    /// How long the search waits for hosts that are offline.
    pub(super) fn patience(&self) -> Patience {
        match self.settings.give_up_after {
            Some(_) => Patience::Short,
            None => Patience::Long,
        }
    }

    /// Hosts that are no replacement for a span: the excluded ones and its own.
    fn others(&self, span: &RoutedSpan) -> BTreeSet<NodeId> {
        let own = span.link.descriptor.host;
        self.call.excluded.iter().copied().chain([own]).collect()
    }

    /// Finds hosts for a span's layers, none of them in `exclude`.
    async fn find(
        &mut self,
        span: &RoutedSpan,
        exclude: BTreeSet<NodeId>,
        patience: Patience,
        cancel: &Cancel,
        otherwise: &ChatError,
    ) -> Result<Vec<RoutedSpan>, ChatError> {
        let layers = span.lo..=span.hi;
        // Once rows are sent, later hosts hold KV computed from this host's output.
        let before = self
            .running
            .then(|| span.link.descriptor.arithmetic.clone());
        let route = self.route_over(layers, exclude, before, patience, cancel);
        route.await.map_err(|error| match error {
            ChatError::Cancelled => error,
            ChatError::ArithmeticMismatch(why) => {
                ChatError::ArithmeticMismatch(format!("{otherwise}; {why}"))
            }
            // The original failure explains more than the missing layers.
            _ => otherwise.clone(),
        })
    }

    /// Runs the source's search on a blocking thread: it may have to connect to hosts.
    pub(super) async fn route_over(
        &mut self,
        layers: RangeInclusive<u32>,
        exclude: BTreeSet<NodeId>,
        before: Option<String>,
        patience: Patience,
        cancel: &Cancel,
    ) -> Result<Vec<RoutedSpan>, ChatError> {
        if let Some(source) = &mut self.source {
            let search = Search {
                layers: layers.clone(),
                exclude: &exclude,
                before: before.as_deref(),
                patience,
                cancel,
            };
            source.ready(&search).await;
        }
        let (source, cancel) = (self.source.take(), cancel.clone());
        let searched = run_blocking(&self.runtime, move || {
            let mut source = source?;
            let route = source.route(&Search {
                layers,
                exclude: &exclude,
                before: before.as_deref(),
                patience,
                cancel: &cancel,
            });
            Some((source, route))
        });
        let Ok(Some((source, route))) = searched.await else {
            return Err(ChatError::Engine("the search for hosts failed".into()));
        };
        self.source = Some(source);
        route
    }

    pub(super) fn sleep(&self, time: Duration) -> tokio::time::Sleep {
        let _context = self.runtime.enter();
        tokio::time::sleep(time)
    }

    /// Returns true if replacements may be faster than a late host. A replacement is not worth the
    /// replay if it was measured at more than half of the late host's time per layer. The late
    /// host's time is the longer of the measured and the current one.
    fn faster(&self, index: usize, others: &[RoutedSpan]) -> bool {
        let measured = |span: &RoutedSpan| {
            let Descriptor { host, shard_id, .. } = &span.link.descriptor;
            self.health
                .look(|all, now| all.ms_per_layer(host, shard_id, now))
        };
        let Some(hop) = self.hops.get(index) else {
            return false;
        };
        let layers = f64::from(hop.span.hi - hop.span.lo + 1);
        let late = hop.hop_timeout.late();
        let late = late.map(|row| row.as_secs_f64() * 1e3 / layers);
        let own = measured(&hop.span).into_iter().chain(late);
        let own = own.reduce(f64::max).unwrap_or(f64::INFINITY);
        // A host that failed recently, for example by being slow, has had its chance.
        let is_good = |span: &RoutedSpan| {
            let host = &span.link.addr.node;
            self.health.look(|all, now| all.standing(host, now)) == Standing::Good
        };
        others
            .iter()
            .all(|span| is_good(span) && measured(span).is_none_or(|theirs| theirs * 2.0 <= own))
    }

    /// Finds hosts for layers of a full host after a pause: other hosts if possible, or the same.
    /// Returns `None` when the room timeout is over.
    async fn find_room(
        &mut self,
        span: &RoutedSpan,
        cancel: &Cancel,
    ) -> Result<Option<Vec<RoutedSpan>>, ChatError> {
        let now = Instant::now();
        let limit = now + self.settings.room_timeout;
        let until = *self.call.room_until.get_or_insert(limit);
        // If there is no randomness, use the shortest pause.
        let pause = pause(self.call.pauses, getrandom::u32().unwrap_or_default());
        if now + pause >= until {
            return Ok(None);
        }
        self.call.pauses += 1;
        self.call.rows = 0;
        let paused = cancel.run_until_cancelled(self.sleep(pause)).await;
        paused.ok_or(ChatError::Cancelled)?;
        let (patience, no_host) = (self.patience(), ChatError::HostsFull(String::new()));
        let route = self.find_others_first(span, patience, cancel, &no_host);
        match route.await {
            Err(ChatError::Cancelled) => Err(ChatError::Cancelled),
            route => Ok(route.ok()),
        }
    }

    /// Replaces the host of a span. The rows of the sequence are replayed to the new ones.
    pub(super) fn replace(&mut self, span: usize, route: Vec<RoutedSpan>) {
        let before = self.audit_span(span, true);
        let reopened = self.pipeline.replace(span, route.len());
        let last = reopened.end.saturating_sub(1);
        let opened = self.reopen(span, route, reopened);
        if let (Some(before), Some(hop)) = (before, self.hops.get_mut(last))
            && self.replaced.len() < MAX_REPLACED
        {
            // Both are exact, so the rows of the replay must be those of before.
            if self.settings.audit_share > 0.0 && hop.receipts.is_some() {
                hop.replaces = Some(Arc::clone(&before.receipts));
                self.pipeline.compare_replay(last);
            }
            self.replaced.push(before);
        }
        self.open_streams(opened);
    }

    /// Replaces the host of a span whose rows may be wrong. The hosts behind it have computed keys
    /// and values from these rows, so they run all rows again in new streams.
    fn redo(&mut self, span: usize, route: Vec<RoutedSpan>) {
        // The rows that hosts behind it returned can still be audited.
        for index in span.saturating_add(1)..self.hops.len() {
            let before = self.audit_span(index, true);
            if self.replaced.len() < MAX_REPLACED {
                self.replaced.extend(before);
            }
        }
        let reopened = self.pipeline.redo(span, route.len());
        self.came.clear();
        let opened = self.reopen(span, route, reopened);
        self.open_streams(opened);
    }

    /// Puts new streams into the place of a span and of its neighbours in `reopened`, which counts
    /// the spans of `route`. The neighbours stay on their hosts.
    fn reopen(
        &mut self,
        span: usize,
        route: Vec<RoutedSpan>,
        reopened: Range<usize>,
    ) -> Range<usize> {
        let behind = reopened.end.saturating_sub(span + route.len());
        let old = reopened.start.min(span)..span + 1 + behind;
        let again = |hop: &Hop| hop.span.clone();
        let before = self.hops.iter().take(span).skip(old.start).map(again);
        let after = self.hops.iter().skip(span + 1).take(behind).map(again);
        let route: Vec<RoutedSpan> = before.chain(route).chain(after).collect();
        let fresh: Vec<Hop> = (reopened.start..)
            .zip(route)
            .map(|(index, routed)| self.hop(index, routed))
            .collect();
        let old = self.hops.splice(old, fresh);
        old.for_each(|hop| hop.release());
        reopened
    }

    /// Called when a row of the answer has arrived: reports the hosts that took over.
    pub(super) fn report_recoveries(&mut self, run: &mut Run<'_>) {
        self.call.failed_at = None;
        self.call.rows += 1;
        if self.call.rows >= ROWS_OF_PROGRESS {
            self.call.room_until = None;
            self.call.preempted.clear();
            self.call.lost.clear();
        }
        for ((lo, hi), mut failover) in std::mem::take(&mut self.call.recoveries) {
            let hops = self.hops.iter();
            let now: Vec<&Hop> = hops
                .filter(|hop| hop.span.lo <= hi && lo <= hop.span.hi)
                .collect();
            failover.to = now.iter().map(|hop| hop.node().to_string()).collect();
            failover.now = now.iter().map(|hop| hop.arithmetic().clone()).collect();
            // Exact hosts compute the same result, so an overflow that the replacement does not
            // report was false.
            let exact = failover.before.is_exact() && failover.now.is_exact();
            if let Some(host) = failover.from.filter(|_| exact)
                && failover.code == Code::BOUNDARY_OVERFLOW
            {
                self.health.failed(&host, FailureKind::Refused);
            }
            failover.report(run);
        }
    }
}

/// The `n`th pause of a call, from 0: one half is fixed, the other is scaled by `random` (0 to
/// `u32::MAX`). Sequences that lost their room together thus do not return together, and none
/// returns at once.
pub(super) fn pause(n: u32, random: u32) -> Duration {
    let half = PAUSE.1.min(PAUSE.0 * 2u32.saturating_pow(n)) / 2;
    half + half.mul_f64(f64::from(random) / 2f64.powi(32))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn pauses_grow_and_stay_bounded() {
        let shortest: Vec<u128> = (0..8).map(|n| pause(n, 0).as_millis()).collect();
        assert_eq!(shortest, [25, 50, 100, 200, 400, 800, 1000, 1000]);
        assert_eq!(pause(u32::MAX, 0), PAUSE.1 / 2);
    }

    #[test]
    fn pauses_of_the_same_length_are_spread_evenly_by_chance() {
        let quarter = 1 << 30;
        let spread = [0, quarter, 2 * quarter, 3 * quarter].map(|random| pause(2, random));
        assert_eq!(spread, [100, 125, 150, 175].map(Duration::from_millis));
    }

    proptest! {
        #[test]
        fn chance_takes_half_of_a_pause_at_most(n in any::<u32>(), random in any::<u32>()) {
            let (least, most) = (pause(n, 0), pause(n, u32::MAX));
            prop_assert!((least..=most).contains(&pause(n, random)));
            prop_assert!(most <= 2 * least && most <= PAUSE.1);
        }
    }
}
