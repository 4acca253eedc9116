//! Writing: what this node says itself, and when it may.

use std::collections::BTreeSet;
use std::path::Path;

use rusqlite::Connection;

use super::body::{Body, CLOCK_SET, Level, MAX_NAMED, Policy};
use super::db;
use super::error::{LogError, Refusal};
use super::event::{Event, EventHash, EventId, Lane, MAX_LIFE_MS, MAX_OFF_MS};
use super::merge::{Merge, Quotas};
use super::store::{ADVERT_LIFE_MS, EventLog};
use super::view::View;
use crate::{CommunityId, NodeId, NodeKey};

impl EventLog {
    /// Makes a community: its log in `dir` (which is made if missing, mode 0700) with the
    /// event that names it, its founder as first anchor and its policy. `root` signs that
    /// event and is needed again only for what anchors may not do.
    ///
    /// # Errors
    /// [`LogError::Exists`] if there is a log in `dir`; [`LogError::Event`] if the name is not
    /// a line of 1 to 64 bytes; what the file system says.
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
        // Before the file exists: a bad name must not leave an empty log behind.
        body.check(community)?;
        let log = Self::prepare(dir, community)?;
        log.append(root, body, now_ms)?;
        Ok(log)
    }

    /// Signs an event and appends it: one transaction, which is on the disk when this
    /// returns. Ephemeral kinds live for [`ADVERT_LIFE_MS`], a `grant.revoked` for
    /// [`MAX_LIFE_MS`]; and at least as long as what they replace.
    ///
    /// # Errors
    /// [`LogError::NoEffect`] if the author may not make this event, or it would change
    /// nothing; [`LogError::Clock`] if others would not take it; [`LogError::Frozen`],
    /// [`LogError::Behind`], [`LogError::Quota`]; what the disk says ([`LogError::ReadOnly`]).
    pub fn append(&self, key: &NodeKey, body: Body, now_ms: u64) -> Result<EventId, LogError> {
        let life_ms = match body {
            Body::GrantRevoked { .. } => MAX_LIFE_MS,
            _ => ADVERT_LIFE_MS,
        };
        self.write(now_ms, |conn, view, quotas| {
            let durable = body.slot().is_none();
            if durable {
                self.check_clock(view, key.id(), &body, now_ms)?;
                view.settle(conn, now_ms, true)?;
            }
            let body = named(view, &body);
            let event = next(conn, view, quotas, key, &body, life_ms, now_ms)?;
            let raw = event.sign(key)?;
            let hash = EventHash::of(&raw).ok_or(LogError::Frozen { author: key.id() })?;
            if durable && body.kind() != CLOCK_SET {
                view.fold.check(&event)?;
            }
            // It may be dated some milliseconds ahead; here it counts at once.
            view.line = view.line.max(event.lamport);
            let mut merge = Merge::new(conn, view, quotas, now_ms);
            match merge.take(&event, hash, &raw)? {
                Ok(_) => {}
                Err(Refusal::Quota { author }) => return Err(LogError::Quota { author }),
                Err(_) => return Err(LogError::Frozen { author: key.id() }),
            }
            merge.finish()?;
            Ok((true, event.id))
        })
    }

    /// Refuses to write with a clock that others do not believe. Asked are those of the members heard
    /// of late who are trusted, or all of them if there are none, but not whom the event is about: who
    /// is to lose a right has no say in when.
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
                *node != author && !about.contains(node) && view.level(node) >= Some(least)
            })
        };
        match heard(Level::Trusted).or_else(|| heard(Level::Member)) {
            Some((offset_ms, _)) if offset_ms.unsigned_abs() > MAX_OFF_MS => {
                Err(LogError::Clock { offset_ms })
            }
            _ => Ok(()),
        }
    }

    /// What is to be done as time passes, every second or so: events whose moment has come take
    /// effect; and if the last event of `key`'s chain was made by a clock that ran ahead, and members
    /// say now that it is right, another one follows, with which others take it and what lies
    /// behind it.
    ///
    /// # Errors
    /// As [`EventLog::append`].
    pub fn tend(&self, key: &NodeKey, now_ms: u64) -> Result<(), LogError> {
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
                "what this node wrote while its clock was {} min ahead is passed on now",
                ahead / 60_000
            );
        }
        Ok(())
    }
}

/// The same, with what its author has seen: of a withdrawal the members that came by the invite.
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

/// The next event of an author, unsigned.
fn next(
    conn: &Connection,
    view: &View,
    quotas: &Quotas,
    key: &NodeKey,
    body: &Body,
    life_ms: u64,
    now_ms: u64,
) -> Result<Event, LogError> {
    let author = key.id();
    let it = view.author(&author);
    if it.fork.is_some() && !it.is_root {
        return Err(LogError::Frozen { author });
    }
    // After everything that has taken effect, and so at most this moment: who leaps ahead leaves
    // others where they are.
    let tip = it.tip.map_or(0, |(_, lamport)| lamport);
    let last = view.fold.at().map_or(0, |at| at.lamport).max(tip);
    let lamport = last.saturating_add(1);
    // An event's Lamport time is at most its time: of several in one millisecond the later ones are
    // dated a few milliseconds ahead.
    let time_ms = now_ms.max(lamport);
    let (seq, lane) = match body.slot() {
        None => {
            let last = db::last_seq(conn, &author)?;
            let state = &view.fold.state;
            // A log that does not even have its first event back has all of it to ask for.
            let others = !state.created || state.members.keys().any(|node| *node != author);
            // The root's history may part, so it need not know all of it.
            if !it.is_root && (last != it.row.head || (db::doubt(conn)? && others)) {
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
            let replaced = view.live.get(&(author, slot.clone()));
            let until = replaced.map_or(0, |live| live.expires_ms);
            let expires_ms = time_ms
                .saturating_add(life_ms)
                .max(until)
                .min(time_ms.saturating_add(MAX_LIFE_MS));
            // Any number that grows will do. The time does so even if this file is lost.
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
