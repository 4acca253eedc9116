//! Writing of this node's own events, and the conditions for it.

use std::collections::BTreeSet;
use std::path::Path;

use rusqlite::Connection;

use super::body::{Body, CLOCK_SET, Level, MAX_NAMED, Policy};
use super::db;
use super::error::{LogError, Refusal};
use super::event::{Event, EventHash, EventId, Lane, MAX_LIFE_MS, MAX_OFF_MS};
use super::merge::{Merge, Quotas};
use super::recover::Own;
use super::store::{ADVERT_LIFE_MS, EventLog};
use super::view::View;
use crate::{CommunityId, NodeId, NodeKey};

impl EventLog {
    /// Creates a community. Its log in `dir` (created with mode 0700 if missing) starts with the
    /// event that sets its name, its founder as first anchor, and its policy. `root` signs that
    /// event; later it is needed only for rights that anchors lack.
    ///
    /// # Errors
    /// [`LogError::Exists`] if there is a log in `dir`; [`LogError::Event`] if the name is not a
    /// line of 1 to 64 bytes; errors of the file system.
    pub fn create(
        dir: &Path,
        root: &NodeKey,
        founder: NodeId,
        name: &str,
        policy: Policy,
        now_ms: u64,
    ) -> Result<Self, LogError> {
        let community = CommunityId::from(root.id());
        let body = Body::CommunityCreated {
            name: name.to_owned(),
            policy,
            founder,
        };
        // Checked before the file exists: a bad name must not leave an empty log behind.
        body.check(community)?;
        let log = Self::prepare(dir, community)?;
        log.append(root, body, now_ms)?;
        Ok(log)
    }

    /// Signs an event and appends it in one transaction, which is on the disk when this returns.
    /// Ephemeral kinds live for [`ADVERT_LIFE_MS`], `grant.revoked` for [`MAX_LIFE_MS`], and all at
    /// least as long as the event that they replace.
    ///
    /// # Errors
    /// [`LogError::NoEffect`] if the author may not make this event, or it would change nothing;
    /// [`LogError::Clock`] if other members would refuse its time; [`LogError::Frozen`],
    /// [`LogError::Behind`], [`LogError::Quota`]; [`LogError::ReadOnly`] and other errors of the
    /// disk.
    pub fn append(&self, key: &NodeKey, body: Body, now_ms: u64) -> Result<EventId, LogError> {
        let durable = body.slot().is_none();
        let work = |conn: &Connection, view: &mut View, quotas: &Quotas| {
            if durable {
                self.check_clock(view, key.id(), &body, now_ms)?;
                view.settle(conn, now_ms, true)?;
            }
            let body = named(view, &body);
            let last_own = || self.last_own(key.id());
            let event = next(conn, view, quotas, key, &body, last_own, now_ms)?;
            let raw = event.sign(key)?;
            let hash = EventHash::of(&raw).ok_or(LogError::Frozen { author: key.id() })?;
            if durable && body.kind() != CLOCK_SET {
                view.fold.check(&event)?;
            }
            // The event may be dated some milliseconds ahead; here it takes effect at once.
            view.activation_ms = view.activation_ms.max(event.lamport);
            let mut merge = Merge::new(conn, view, quotas, now_ms);
            match merge.take(&event, hash, &raw)? {
                Ok(_) => {}
                Err(Refusal::Quota { author }) => return Err(LogError::Quota { author }),
                Err(_) => return Err(LogError::Frozen { author: key.id() }),
            }
            merge.finish()?;
            Ok((true, event))
        };
        let event = self.write_own(now_ms, work, |event| {
            let (author, seq, guard) = (event.author, event.seq, &self.inner.guard);
            match durable {
                false => {}
                // The root's history may fork.
                true if author == self.community().root() => guard.sync(),
                true => guard.mark_own(Own { author, seq }),
            }
        })?;
        Ok(event.id)
    }

    /// Refuses to write with a clock that other members contradict. It is compared with the clocks
    /// of trusted members heard recently or, if there are none, of all members heard recently.
    /// Subjects of the event are excluded: a member that is about to lose a right must not
    /// influence the time.
    fn check_clock(
        &self,
        view: &View,
        author: NodeId,
        body: &Body,
        now_ms: u64,
    ) -> Result<(), LogError> {
        let (about, clocks) = (body.nodes(), self.inner.clocks.lock());
        let heard = |least: Level| {
            clocks.offset(now_ms, |node| {
                *node != author
                    && !about.contains(node)
                    && view.fold.state.level(node) >= Some(least)
            })
        };
        match heard(Level::Trusted).or_else(|| heard(Level::Member)) {
            Some((offset_ms, _)) if offset_ms.unsigned_abs() > MAX_OFF_MS => {
                Err(LogError::Clock { offset_ms })
            }
            _ => Ok(()),
        }
    }

    /// Periodic maintenance, to be called about once a second. Applies events whose activation time
    /// has come. Ends a doubt if the members that were not asked do not run any more. If the last event
    /// of `key`'s chain was post-dated by a wrong clock, and members' clocks now agree with this one, it
    /// appends a `clock.set` event, so that other nodes accept the chain.
    ///
    /// # Errors
    /// As [`EventLog::append`].
    pub fn maintain(&self, key: &NodeKey, now_ms: u64) -> Result<(), LogError> {
        self.end_doubt(key.id(), now_ms)?;
        let (waiting, ahead) = {
            let writer = self.inner.writer.lock();
            let time_ms = writer.view.last_time(&writer.conn, &key.id())?;
            (writer.view.is_waiting(), time_ms.saturating_sub(now_ms))
        };
        if waiting {
            self.write(now_ms, |_, _, _| Ok((false, ())))?;
        }
        if ahead > MAX_OFF_MS && self.clock_offset(now_ms).is_some() {
            let body = Body::Unknown {
                kind: CLOCK_SET.to_owned(),
                slot: None,
                bytes: vec![0xa0],
            };
            self.append(key, body, now_ms)?;
            tracing::warn!(
                "events that this node wrote while its clock was {} min ahead are sent to others now",
                ahead / 60_000
            );
        }
        Ok(())
    }
}

/// Returns the body, with the current members by the invite filled into a withdrawal.
fn named(view: &View, body: &Body) -> Body {
    let mut body = body.clone();
    if let Body::InviteWithdrawn { invite, members } = &mut body {
        let all = view.fold.state.members.iter();
        let came = all.filter(|(_, member)| member.invite == Some(*invite));
        let came: BTreeSet<NodeId> = came.map(|(node, _)| *node).collect();
        *members = Some(came).filter(|came| came.len() <= MAX_NAMED);
    }
    body
}

/// Next event of an author, unsigned. `last_own` reads the number of its last durable event, if that is
/// known.
fn next(
    conn: &Connection,
    view: &View,
    quotas: &Quotas,
    key: &NodeKey,
    body: &Body,
    last_own: impl FnOnce() -> Option<u64>,
    now_ms: u64,
) -> Result<Event, LogError> {
    let author = key.id();
    let it = view.author(&author);
    if it.fork.is_some() && !it.is_root {
        return Err(LogError::Frozen { author });
    }
    // After all events that have taken effect, and so at most the current time. A post-dated event
    // does not move the dates of other authors.
    let tip = it.tip.map_or(0, |(_, lamport)| lamport);
    let last = view.fold.at.map_or(0, |at| at.lamport).max(tip);
    let lamport = last.saturating_add(1);
    // The Lamport time of an event is at most its time. Of several events in one millisecond, the
    // later ones are dated a few milliseconds ahead.
    let time_ms = now_ms.max(lamport);
    let (seq, lane) = match body.slot() {
        None => {
            let last = db::last_seq(conn, &author)?;
            // The root's history may fork, so the log need not have all of it.
            if !it.is_root && (last != it.row.head || must_ask(conn, view, author, last, last_own)?)
            {
                return Err(LogError::Behind { author });
            }
            if last >= quotas.events_per_author {
                return Err(LogError::Quota { author });
            }
            let before = db::durable_at(conn, &author, last)?;
            let prev = before.first().map_or(EventHash::ZERO, |row| row.hash);
            (last.saturating_add(1), Lane::Durable { prev })
        }
        Some(slot) => {
            let life_ms = match body {
                Body::GrantRevoked { .. } => MAX_LIFE_MS,
                _ => ADVERT_LIFE_MS,
            };
            let replaced = view.shown.live.get(&(author, slot.clone()));
            let until = replaced.map_or(0, |live| live.expires_ms);
            let expires_ms = time_ms
                .saturating_add(life_ms)
                .max(until)
                .min(time_ms.saturating_add(MAX_LIFE_MS));
            // Any growing number will do. The time grows even if this file is lost.
            let seq = it.row.ephemeral.saturating_add(1).max(now_ms);
            (seq, Lane::Ephemeral { slot, expires_ms })
        }
    };
    Ok(Event {
        community: view.community,
        author,
        seq,
        lamport,
        time_ms,
        id: EventId::after(time_ms, &author, view.last(conn)?),
        lane,
        body: body.clone(),
    })
}

/// Returns whether a log in doubt must ask other nodes before `author` writes: there are others to ask,
/// or own events may be missing, and with them the events that admitted the others.
fn must_ask(
    conn: &Connection,
    view: &View,
    author: NodeId,
    last: u64,
    last_own: impl FnOnce() -> Option<u64>,
) -> Result<bool, LogError> {
    let Some(doubt) = db::doubt(conn)? else {
        return Ok(false);
    };
    let state = &view.fold.state;
    // A log without even the first event has all events to ask for.
    let others = !state.created || state.members.keys().any(|node| *node != author);
    Ok(others || last_own().map_or(doubt == db::Doubt::Lost, |seq| last < seq))
}
