//! Receiving of events from peers: verification, storage and fold.

use std::collections::BTreeMap;

use hearthnet_transport::give_way;

use super::body::Body;
use super::db;
use super::early::{MAX_EARLY, Signed, without_early};
use super::error::{LogError, Refusal};
use super::event::{Event, EventHash, Lane, MAX_OFF_MS};
use super::merge::{Merge, Taken};
use super::store::EventLog;
use crate::NodeId;

/// Result of receiving a batch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Received {
    /// Indices of the new events in the batch; to be passed on.
    pub accepted: Vec<usize>,
    /// Number of events that were stored before.
    pub known: usize,
    /// Indices of the refused events, with the reasons.
    pub refused: Vec<(usize, Refusal)>,
}

impl EventLog {
    /// Verifies, stores and folds the events of a peer. Events that are stored already change
    /// nothing. All accepted events are on the disk when this returns.
    ///
    /// The relaying peer `from` has no influence on an event. It is used for the program's log file
    /// and for [`EventLog::clock_offset`].
    ///
    /// # Errors
    /// [`LogError::ReadOnly`] and other errors of the disk; then no event of the batch was stored.
    pub fn receive(
        &self,
        raw: &[Vec<u8>],
        from: NodeId,
        now_ms: u64,
    ) -> Result<Received, LogError> {
        let mut received = Received::default();
        let unknown = self.unknown(raw)?;
        received.known = raw.len().saturating_sub(unknown.len());
        // Verify signatures before the transaction: they take a hundred times longer than the rest.
        let mut verified = Vec::with_capacity(unknown.len());
        for (place, hash, raw) in unknown {
            give_way();
            match self.verify_one(raw, from, now_ms) {
                Ok(event) => verified.push(Signed {
                    place: Some(place),
                    hash,
                    raw: raw.to_vec(),
                    event,
                }),
                Err(why) => received.refused.push((place, why)),
            }
        }
        if !verified.is_empty() {
            let mut held = std::mem::take(&mut *self.inner.early.lock());
            held.retain(|one| verified.iter().all(|new| new.hash != one.hash));
            verified.extend(held.iter().cloned());
            let early = self.write(now_ms, |conn, view, quotas| {
                let (early, rest) = without_early(conn, verified, now_ms)?;
                let mut merge = Merge::new(conn, view, quotas, now_ms);
                let mut changed = false;
                for one in &rest {
                    let taken = merge.take(&one.event, one.hash, &one.raw)?;
                    changed |= taken == Ok(Taken::New);
                    match (taken, one.place) {
                        (Ok(Taken::New), Some(place)) => received.accepted.push(place),
                        (Ok(Taken::Known), Some(_)) => received.known += 1,
                        (Err(why), Some(place)) => received.refused.push((place, why)),
                        (_, None) => {}
                    }
                }
                if changed {
                    merge.finish()?;
                }
                Ok((changed, early))
            });
            // The peer sends its batch again, but not the events of earlier ones.
            let early = early.inspect_err(|_| self.inner.early.lock().extend(held))?;
            for one in &early {
                let ahead_ms = one.event.time_ms.saturating_sub(now_ms);
                let refused = one.place.map(|place| (place, Refusal::Time { ahead_ms }));
                received.refused.extend(refused);
            }
            let newest = early.into_iter().rev().take(MAX_EARLY);
            let kept = newest.map(|one| Signed { place: None, ..one });
            self.inner.early.lock().extend(kept);
        }
        received.refused.sort_by_key(|(place, _)| *place);
        for (_, why) in &received.refused {
            metrics::counter!("hearthnet_log_refused_total", "code" => why.code()).increment(1);
            tracing::debug!(from = %from.short(), code = %why.code(), "refused an event: {why}");
        }
        Ok(received)
    }

    /// Members whose last event is post-dated so far that other nodes refuse it, with the
    /// milliseconds that it is ahead of this machine's clock. Includes events refused since this
    /// handle was opened and events that this node wrote while its own clock was wrong.
    ///
    /// # Errors
    /// [`LogError::Corrupt`], or errors of the disk.
    pub fn dated_ahead(&self, now_ms: u64) -> Result<BTreeMap<NodeId, u64>, LogError> {
        let writer = self.inner.writer.lock();
        let view = &writer.view;
        let mut last = BTreeMap::new();
        for author in view.fold.state.members.keys() {
            last.insert(*author, view.last_time(&writer.conn, author)?);
        }
        for Signed { event, .. } in self.inner.early.lock().iter() {
            if let Some(last) = last.get_mut(&event.author) {
                *last = event.time_ms.max(*last);
            }
        }
        let ahead = last.into_iter();
        let ahead = ahead.map(|(author, time_ms)| (author, time_ms.saturating_sub(now_ms)));
        Ok(ahead.filter(|(_, ms)| *ms > MAX_OFF_MS).collect())
    }

    /// Returns the events that are not stored yet, with their indices and hashes.
    #[allow(clippy::type_complexity)]
    fn unknown<'a>(
        &self,
        raw: &'a [Vec<u8>],
    ) -> Result<Vec<(usize, EventHash, &'a [u8])>, LogError> {
        let mut unknown = Vec::with_capacity(raw.len());
        let mut writer = self.inner.writer.lock();
        // Events in the file must be in the view too, or they would never get there.
        self.inner.update(&mut writer)?;
        for (place, bytes) in raw.iter().enumerate() {
            let hash = EventHash::of(bytes).unwrap_or(EventHash::ZERO);
            // Looking for the hash, which covers the whole event, does not need checked keys.
            let known = match Event::decode_stored(bytes) {
                Err(_) => false,
                Ok(event) => match event.lane {
                    Lane::Durable { .. } => db::durable_at(&writer.conn, &event.author, event.seq)?
                        .iter()
                        .any(|row| row.hash == hash),
                    Lane::Ephemeral { slot, .. } => {
                        let live = writer.view.shown.live.get(&(event.author, slot));
                        live.is_some_and(|live| live.hash == hash)
                    }
                },
            };
            if !known {
                unknown.push((place, hash, bytes.as_slice()));
            }
        }
        Ok(unknown)
    }

    /// Checks everything about an event that does not need the stored log.
    fn verify_one(&self, raw: &[u8], from: NodeId, now_ms: u64) -> Result<Event, Refusal> {
        let event = Event::verify_with(raw, &mut self.inner.checked.lock())?;
        if event.author == from && matches!(event.body, Body::NodeSeen { .. }) {
            self.inner.clocks.lock().note(from, event.time_ms, now_ms);
        }
        if event.community != self.community() {
            return Err(Refusal::Foreign(event.community));
        }
        if let Lane::Ephemeral { expires_ms, .. } = event.lane
            && expires_ms <= now_ms
        {
            return Err(Refusal::Stale);
        }
        Ok(event)
    }

    /// Offset of the neighbours' clocks from this one in milliseconds (positive: they are ahead),
    /// with the number of neighbours measured. The offset is the median of the announcements
    /// received from their authors since this handle was opened. An announcement may be 40 s old,
    /// so less than a minute is not significant. `None` before the first one.
    pub fn clock_offset(&self, now_ms: u64) -> Option<(i64, usize)> {
        self.inner.clocks.lock().offset(now_ms, |_| true)
    }
}
