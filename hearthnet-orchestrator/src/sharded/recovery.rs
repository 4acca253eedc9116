//! Other hosts in the place of one that has failed, leaves, or has no room any more.
//!
//! | why | asked again in this call | counts as a failure | when nobody else has the layers |
//! |---|---|---|---|
//! | it failed | no | yes | the call ends, or this machine goes on |
//! | its session is gone | yes, [`COMEBACKS`] times | yes | it is waited for, then as above |
//! | it is slow | no | if another takes over | it stays, and is looked at again later |
//! | it is silent | no | if another takes over | it has until the health timeout, 4 s where this machine may take over |
//! | it leaves | no | no | it stays as long as it can |
//! | it may not see rows any more | no | no | the call ends, or this machine goes on |
//! | it has no room, once the sequence has begun | yes, after a pause | no | it is asked again |
//! | it has no room at the start | no | no | the sequence waits (`starting.rs`) |

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use hearthnet_bus::flight::Event;
use hearthnet_bus::{Descriptor, NodeId};
use hearthnet_transport::Code;

use super::ShardedBackend;
use super::failure::{Cause, HopFailure};
use super::stream::Hop;
use crate::Cancel;
use crate::backend::Run;
use crate::error::ChatError;
use crate::events::{Failover, tell};
use crate::exact::Arithmetics;
use crate::health::{FailureKind, Standing};
use crate::hosts::{Patience, RoutedSpan, Search};

/// How long after a search for somebody in the place of a leaving host the next one follows.
pub(super) const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// The same for a host that does its work, only slowly.
const LOOK_AGAIN_LATER: Duration = Duration::from_secs(10);

/// What is between two requests for room on hosts whose memory is taken, before chance shortens
/// it: at first, and at most. The first is some decode steps of the sequences that go on there.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// Rows of an answer that make up for having asked for room: a page of a host. Whoever answers one and
/// takes the memory back for the next has no room.
const ROWS_PER_ROOM: u32 = 16;
/// Preemptions with fewer rows in between that count as a failure of the host.
const PREEMPTIONS: u32 = 3;
/// How often a host is asked again whose session was lost, with fewer rows in between: a host that this
/// very prompt stops is left.
const COMEBACKS: u32 = 3;

impl ShardedBackend {
    /// Puts other hosts in the place of those that something is wrong with.
    pub(super) async fn settle(&mut self, run: &mut Run<'_>) -> Result<(), ChatError> {
        while let Some(failure) = self.hop_failures.pop_front() {
            // It may have been replaced since.
            if let Some(index) = self.hops.iter().position(|hop| hop.id == failure.hop) {
                self.recover(index, failure, run).await?;
            }
        }
        Ok(())
    }

    async fn recover(
        &mut self,
        index: usize,
        failure: HopFailure,
        run: &mut Run<'_>,
    ) -> Result<(), ChatError> {
        let Some(hop) = self.hops.get(index) else {
            return Ok(());
        };
        if run.cancel.is_cancelled() {
            return Err(ChatError::Cancelled);
        }
        // The request itself is at fault: another host would say the same.
        if matches!(failure.error, ChatError::BadRequest(_)) {
            return Err(failure.error);
        }
        let (layers, node) = ((hop.span.lo, hop.span.hi), hop.node());
        let mut failover = Failover {
            pipeline: self.name,
            shard_id: self.shard_id(hop),
            from: Some(node),
            to: Vec::new(),
            code: failure.code.clone(),
            replayed: 0,
            before: Arithmetics::from_iter([hop.arithmetic().clone()]),
            now: Arithmetics::default(),
            since: Instant::now(),
        };
        if failure.code == Code::PREEMPTED {
            tell(Event::HostPreempted {
                pipeline: self.name,
                host: node,
                shard: failover.shard_id.as_str().into(),
            });
            let times = self.call.preempted.entry(node).or_default();
            *times += 1;
            if times.is_multiple_of(PREEMPTIONS) {
                self.health.failed(&node, FailureKind::Refused);
            }
        }
        let route = if failure.cause.stays() {
            let others = self.others(index);
            let none = Patience::None;
            let route = self.find(index, others, none, run.cancel, &failure.error);
            let route = route.await;
            let late = failure.cause == Cause::Late;
            let Some(route) = route.ok().filter(|to| !late || self.faster(index, to)) else {
                self.look_again(index, failure.cause);
                return Ok(());
            };
            self.call.failed_at.get_or_insert(failover.since);
            self.leave(index, &failure, run)?;
            route
        } else {
            if failure.cause == Cause::Room
                && let Some(route) = self.find_room(index, run.cancel).await?
            {
                let computes = |span: &RoutedSpan| span.link.descriptor.arithmetic.clone();
                if failover.before != route.iter().map(computes).collect::<Arithmetics>() {
                    failover.replayed = self.pipeline.length();
                    self.call.recoveries.push((layers, failover));
                }
                self.replace(index, route);
                return Ok(());
            }
            self.call.failed_at.get_or_insert(failover.since);
            self.leave(index, &failure, run)?;
            self.find_anybody(index, &failure, run.cancel).await?
        };
        failover.replayed = self.pipeline.length();
        self.call.recoveries.push((layers, failover));
        self.replace(index, route);
        Ok(())
    }

    /// Nobody else has a host's layers, and it goes on: when to look for somebody again.
    fn look_again(&mut self, index: usize, cause: Cause) {
        let Some(hop) = self.hops.get_mut(index) else {
            return;
        };
        let now = Instant::now();
        match cause {
            Cause::Late => hop.look_again = Some(now + LOOK_AGAIN_LATER),
            Cause::Silent => hop.look_again = Some(now + LOOK_AGAIN),
            _ => hop.move_at = Some(now + LOOK_AGAIN),
        }
    }

    /// A host is not asked again in this call. What went wrong with it is told, and counted if it is a
    /// failure.
    fn leave(
        &mut self,
        index: usize,
        failure: &HopFailure,
        run: &mut Run<'_>,
    ) -> Result<(), ChatError> {
        let Some(hop) = self.hops.get(index) else {
            return Ok(());
        };
        let (cause, code) = (failure.cause, failure.code.clone());
        let lost = self.call.lost.entry(hop.node()).or_default();
        *lost += u32::from(cause == Cause::Lost);
        if cause != Cause::Lost || *lost > COMEBACKS {
            self.call.excluded.insert(hop.node());
        }
        if cause == Cause::Full {
            let why = || failure.error.to_string();
            self.call.full.get_or_insert_with(why);
        }
        if !cause.is_told() {
            return Ok(());
        }
        let (shard_id, host) = (self.shard_id(hop), hop.node());
        (run.notify)(self.status("degraded", hop, code.clone()));
        tracing::warn!(%shard_id, %code, "a host has failed: {}", failure.error);
        let kind = match cause {
            Cause::Corrupt => Some(FailureKind::Corruption),
            _ => FailureKind::of_code(&code),
        };
        tell(Event::HostFailed {
            pipeline: self.name,
            host,
            shard: shard_id.as_str().into(),
            code,
        });
        if let Some(kind) = kind {
            self.health.failed(&host, kind);
        }
        if cause == Cause::Barred {
            return Ok(());
        }
        self.call.failures += 1;
        match self.settings.give_up_after {
            // Before the first row there is nothing that this machine could go on with.
            Some(limit) if self.call.failures >= limit && self.running => {
                Err(failure.error.clone())
            }
            _ => Ok(()),
        }
    }

    /// Hosts in the place of one that was left: others that are at hand, or whoever is there next. That
    /// may be the same host, if its session was lost only.
    async fn find_anybody(
        &mut self,
        index: usize,
        failure: &HopFailure,
        cancel: &Cancel,
    ) -> Result<Vec<RoutedSpan>, ChatError> {
        let (others, otherwise) = (self.others(index), &failure.error);
        let patience = match failure.cause {
            Cause::Full => Patience::None,
            // Others have been looked for while it was silent.
            _ if failure.code == Code::SILENT => Patience::None,
            _ => self.patience(),
        };
        if failure.cause != Cause::Lost || self.call.excluded.is_superset(&others) {
            return self.find(index, others, patience, cancel, otherwise).await;
        }
        let none = Patience::None;
        match self.find(index, others, none, cancel, otherwise).await {
            Err(error) if error != ChatError::Cancelled => {
                let exclude = self.call.excluded.clone();
                self.find(index, exclude, patience, cancel, otherwise).await
            }
            found => found,
        }
    }

    /// How long hosts are waited for that are not there.
    pub(super) fn patience(&self) -> Patience {
        match self.settings.give_up_after {
            Some(_) => Patience::Short,
            None => Patience::Long,
        }
    }

    /// The hosts that are no others for a span: those that are not asked again, and its own.
    fn others(&self, index: usize) -> BTreeSet<NodeId> {
        let own = self.hops.get(index).map(Hop::node);
        self.call.excluded.iter().copied().chain(own).collect()
    }

    /// Hosts that run a span's layers, none of them in `exclude`.
    async fn find(
        &mut self,
        index: usize,
        exclude: BTreeSet<NodeId>,
        patience: Patience,
        cancel: &Cancel,
        otherwise: &ChatError,
    ) -> Result<Vec<RoutedSpan>, ChatError> {
        let Some(hop) = self.hops.get(index) else {
            return Err(otherwise.clone());
        };
        let layers = hop.span.lo..=hop.span.hi;
        let before = self.before(hop);
        let route = self.route_over(layers, exclude, before, patience, cancel);
        route.await.map_err(|error| match error {
            ChatError::Cancelled => error,
            ChatError::ArithmeticMismatch(why) => {
                ChatError::ArithmeticMismatch(format!("{otherwise}; {why}"))
            }
            // What went wrong explains more than the hole that it leaves.
            _ => otherwise.clone(),
        })
    }

    /// What whoever goes on behind a host has to compute with, where that is not free: once rows are on
    /// their way, hosts behind it keep what they made of its own.
    fn before(&self, hop: &Hop) -> Option<String> {
        self.running.then(|| hop.arithmetic().clone())
    }

    /// Asks the source for hosts, on a thread of its own: it may have to connect to them.
    pub(super) async fn route_over(
        &mut self,
        layers: RangeInclusive<u32>,
        exclude: BTreeSet<NodeId>,
        before: Option<String>,
        patience: Patience,
        cancel: &Cancel,
    ) -> Result<Vec<RoutedSpan>, ChatError> {
        let (source, cancel) = (self.source.take(), cancel.clone());
        let searched = self.runtime.spawn_blocking(move || {
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

    /// Whether a late host's work may be done sooner by others: hosts that were measured to need more
    /// than half of its time are not worth the replay. Its time is what it takes now, whatever it took
    /// in earlier calls.
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
        // Whoever has failed of late, by being as slow say, has had its chance.
        let is_good = |span: &RoutedSpan| {
            let host = &span.link.addr.node;
            self.health.look(|all, now| all.standing(host, now)) == Standing::Good
        };
        others
            .iter()
            .all(|span| is_good(span) && measured(span).is_none_or(|theirs| theirs * 2.0 <= own))
    }

    /// Hosts for layers where there is no room, after a pause: others if there are any, or the
    /// same. `None` when that has gone on for too long.
    async fn find_room(
        &mut self,
        index: usize,
        cancel: &Cancel,
    ) -> Result<Option<Vec<RoutedSpan>>, ChatError> {
        let now = Instant::now();
        let limit = now + self.settings.room_timeout;
        let until = *self.call.room_until.get_or_insert(limit);
        // Without randomness the shortest pause has to do.
        let pause = pause(self.call.pauses, getrandom::u32().unwrap_or_default());
        let Some(hop) = self.hops.get(index).filter(|_| now + pause < until) else {
            return Ok(None);
        };
        let (layers, before) = (hop.span.lo..=hop.span.hi, self.before(hop));
        self.call.pauses += 1;
        self.call.rows = 0;
        let paused = cancel.or(self.sleep(pause)).await;
        paused.ok_or(ChatError::Cancelled)?;
        let nobody = ChatError::HostsFull(String::new());
        let others = self.others(index);
        let none = Patience::None;
        let mut route = self.find(index, others, none, cancel, &nobody).await;
        if !matches!(route, Ok(_) | Err(ChatError::Cancelled)) {
            let excluded = self.call.excluded.clone();
            let any = self.route_over(layers, excluded, before, self.patience(), cancel);
            route = any.await;
        }
        match route {
            Err(ChatError::Cancelled) => Err(ChatError::Cancelled),
            route => Ok(route.ok()),
        }
    }

    /// Opens streams for the spans that take over.
    fn replace(&mut self, span: usize, route: Vec<RoutedSpan>) {
        let count = route.len();
        let reopened = self.pipeline.replace(span, count);
        // Those before it that run again begin a new life on the same host.
        let again = self.hops.iter().take(span).skip(reopened.start);
        let again: Vec<RoutedSpan> = again.map(|hop| hop.span.clone()).collect();
        let fresh: Vec<Hop> = (reopened.start..)
            .zip(again.into_iter().chain(route))
            .map(|(index, routed)| self.hop(index, routed))
            .collect();
        let old = self.hops.splice(reopened.start..=span, fresh);
        old.for_each(|hop| hop.release());
        self.open_streams(reopened);
    }

    /// A row of the answer is there: who has taken over is told.
    pub(super) fn report_recoveries(&mut self, run: &mut Run<'_>) {
        self.call.failed_at = None;
        self.call.rows += 1;
        if self.call.rows >= ROWS_PER_ROOM {
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
            // Exact hosts compute the same: what the next one does not have was no overflow.
            let exact = failover.before.is_exact() && failover.now.is_exact();
            if let Some(host) = failover.from.filter(|_| exact)
                && failover.code == Code::BOUNDARY_OVERFLOW
            {
                self.health.failed(&host, FailureKind::Refused);
            }
            failover.tell(run);
        }
    }

    /// The layers that a hop runs, of this side's own model.
    pub(super) fn shard_id(&self, hop: &Hop) -> String {
        Descriptor::shard_id(&self.model.model_id, hop.span.lo, hop.span.hi)
    }
}

/// The `n`th pause of a call, from 0: half of what is due, and of the other half as much as
/// `random` says (0: nothing, `u32::MAX`: all but all of it). Those who lost their room together
/// do not come back together, and none of them comes back at once.
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
