//! Reports for people: a listing of all events with their status, a full check, and an export.
//!
//! All three read through a connection of their own, so a long report does not block other work.

use std::collections::{BTreeMap, HashMap};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rusqlite::Connection;
use serde::Serialize;

use super::body::Body;
use super::db;
use super::error::LogError;
use super::event::{Checked, Event, EventHash, Lane};
use super::fold::{Fold, NoEffect};
use super::store::EventLog;
use super::view::View;
use crate::NodeId;

/// Event as printed by `log show` and `log export`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Record {
    /// Hash of the signed fields.
    pub hash: EventHash,
    pub kind: String,
    pub status: Status,
    #[serde(flatten)]
    pub event: Event,
    /// Signed bytes, base64 in JSON.
    #[serde(serialize_with = "base64")]
    pub raw: Vec<u8>,
}

impl Record {
    fn new(hash: EventHash, status: Status, event: Event, raw: Vec<u8>) -> Self {
        Self {
            hash,
            kind: event.body.kind().to_owned(),
            status,
            event,
            raw,
        }
    }
}

/// Effect of an event on the community.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// The event changed the community.
    Effective,
    /// The event changed nothing: its author may not do this, or there was nothing to change.
    NoEffect(#[serde(serialize_with = "sentence")] NoEffect),
    /// An earlier event of the author is missing.
    Waiting,
    /// The author's history forks here.
    Fork,
    /// The newest ephemeral event of its slot.
    Live,
}

/// Result of [`EventLog::verify`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verified {
    /// Durable events checked.
    pub durable: u64,
    /// Ephemeral events checked.
    pub ephemeral: u64,
    /// Problems found, a sentence each; empty if there are none.
    pub problems: Vec<String>,
    /// Number of void events per author that was demoted or revoked: the author of that change had
    /// not seen these events. Wherever they sort, they count for no more than the author's level
    /// now. Neither this nor [`Self::late`] counts `node.gave`.
    pub void: BTreeMap<NodeId, u64>,
    /// Number of late events per other author: they arrived after others had written events that
    /// sort after them. Such an author was offline, or backdates its events.
    pub late: BTreeMap<NodeId, u64>,
}

/// Maximum number of listed problems.
const MAX_PROBLEMS: usize = 100;

fn base64<S: serde::Serializer>(raw: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&STANDARD.encode(raw))
}

fn sentence<S: serde::Serializer>(why: &NoEffect, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(why)
}

impl Verified {
    fn problem(&mut self, what: impl Into<String>) {
        if self.problems.len() < MAX_PROBLEMS {
            self.problems.push(what.into());
        }
    }
}

impl EventLog {
    fn reader(&self) -> Result<Connection, LogError> {
        db::open(self.path(), false)
    }

    /// Visits every event: the durable ones in the order of the log, then the ephemeral ones. Stops
    /// when `visit` returns false.
    ///
    /// # Errors
    /// [`LogError::Corrupt`], errors of the disk, and errors of `visit`.
    pub fn records(
        &self,
        mut visit: impl FnMut(Record) -> Result<bool, LogError>,
    ) -> Result<(), LogError> {
        let conn = self.reader()?;
        let tx = conn.unchecked_transaction()?;
        let view = View::load(&tx, self.moment())?;
        let mut replay = view.fold.replay();
        let mut go_on = true;
        db::walk(&tx, 0, |at, arrival| {
            let raw = db::raw(&tx, arrival)?;
            let event = Event::decode_stored(&raw)?;
            let author = view.authors.get(&at.author);
            let status = if author.is_some_and(|author| author.has(at.seq)) {
                match replay.again(&event) {
                    Ok(()) => Status::Effective,
                    Err(why) => Status::NoEffect(why),
                }
            } else if author.is_some_and(|author| author.row.fork == Some(at.seq)) {
                Status::Fork
            } else {
                Status::Waiting
            };
            let hash = EventHash::of(&raw).unwrap_or(EventHash::ZERO);
            go_on = visit(Record::new(hash, status, event, raw))?;
            Ok(go_on)
        })?;
        if !go_on {
            return Ok(());
        }
        db::ephemerals(&tx, |row| {
            let event = Event::decode_stored(&row.raw)?;
            visit(Record::new(row.hash, Status::Live, event, row.raw))
        })
    }

    /// Checks everything from the stored bytes: the pages of the file, every hash and signature,
    /// every chain, and that the stored state follows from the events.
    ///
    /// # Errors
    /// If the file cannot be read at all. Problems of its content are in the result.
    pub fn verify(&self) -> Result<Verified, LogError> {
        let conn = self.reader()?;
        let mut found = Verified::default();
        for what in db::integrity(&conn)? {
            found.problem(format!("the database says: {what}"));
        }
        let tx = conn.unchecked_transaction()?;
        let view = match View::load(&tx, self.moment()) {
            Ok(view) => view,
            Err(error) => {
                found.problem(error.to_string());
                return Ok(found);
            }
        };
        let mut checked = Checked::default();
        let mut tips: BTreeMap<_, (u64, EventHash)> = BTreeMap::new();
        let mut dating = Dating::of(&view);
        db::walk(&tx, 0, |at, arrival| {
            found.durable += 1;
            let name = format!("event {} of {}", at.seq, at.author);
            let read = db::raw(&tx, arrival).and_then(|raw| {
                let event = Event::verify_with(&raw, &mut checked)?;
                Ok((event, EventHash::of(&raw).unwrap_or(EventHash::ZERO)))
            });
            let (event, hash) = match read {
                Ok(read) => read,
                Err(error) => {
                    found.problem(format!("{name}: {error}"));
                    return Ok(true);
                }
            };
            if event.position() != at || event.community != view.community {
                found.problem(format!(
                    "{name} is stored under the position of another event"
                ));
            }
            dating.hear(&event, hash);
            let author = view.author(&at.author);
            if at.seq <= author.row.head {
                let tip = tips.insert(at.author, (at.seq, hash));
                let (seq, before) = tip.unwrap_or((0, EventHash::ZERO));
                if seq + 1 != at.seq || event.lane != (Lane::Durable { prev: before }) {
                    found.problem(format!("{name} does not follow the event before it"));
                }
            }
            Ok(true)
        })?;
        for (author, it) in &view.authors {
            let last = tips.get(author).map_or(0, |(seq, _)| *seq);
            if last != it.row.head {
                found.problem(format!(
                    "the history of {author} ends at {last}, not {}",
                    it.row.head
                ));
            }
        }
        db::ephemerals(&tx, |row| {
            found.ephemeral += 1;
            if let Err(error) = Event::verify_with(&row.raw, &mut checked) {
                found.problem(format!("the slot {} of {}: {error}", row.slot, row.author));
            }
            Ok(true)
        })?;
        (found.void, found.late) = dating.found();
        if view.fold_anew(&tx)?.state != view.fold.state {
            found.problem("the stored state does not follow from the events");
        }
        Ok(found)
    }

    /// Counts the late and void events of each author ([`Verified::late`], [`Verified::void`]),
    /// without checking anything again.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn dated_back(&self) -> Result<BTreeMap<NodeId, u64>, LogError> {
        let conn = self.reader()?;
        let tx = conn.unchecked_transaction()?;
        let view = View::load(&tx, self.moment())?;
        let mut dating = Dating::of(&view);
        db::walk(&tx, 0, |_, arrival| {
            let raw = db::raw(&tx, arrival)?;
            let hash = EventHash::of(&raw).unwrap_or(EventHash::ZERO);
            dating.hear(&Event::decode_stored(&raw)?, hash);
            Ok(true)
        })?;
        let (mut found, late) = dating.found();
        found.extend(late);
        Ok(found)
    }
}

/// Detection of events that are, or may be, backdated. Events without a right ([`is_report`]) are
/// never reported: all nodes write them right after midnight, so two that are written at the same
/// moment are normal.
struct Dating<'a> {
    view: &'a View,
    replay: Fold,
    order: Witnesses,
    void: BTreeMap<NodeId, u64>,
}

impl<'a> Dating<'a> {
    fn of(view: &'a View) -> Self {
        Self {
            view,
            replay: view.fold.replay(),
            order: Witnesses::default(),
            void: BTreeMap::new(),
        }
    }

    /// Processes the next event in the order. Only events in their author's chain count.
    fn hear(&mut self, event: &Event, hash: EventHash) {
        let author = self.view.authors.get(&event.author);
        if !author.is_some_and(|author| author.has(event.seq)) {
            return;
        }
        if self.replay.is_void(event) && !is_report(event) {
            *self.void.entry(event.author).or_default() += 1;
        }
        // The result is irrelevant here: the state has the effect.
        let _ = self.replay.again(event);
        if self.view.fold.knows(&event.author) {
            self.order.hear(event, hash);
        }
    }

    /// Returns [`Verified::void`] and [`Verified::late`].
    fn found(self) -> (BTreeMap<NodeId, u64>, BTreeMap<NodeId, u64>) {
        let mut late = self.order.late();
        late.retain(|author, _| !self.void.contains_key(author));
        (self.void, late)
    }
}

/// Whether an event only reports what its author did, so that its author gains nothing by its place.
fn is_report(event: &Event) -> bool {
    matches!(event.body, Body::NodeGave(_))
}

/// Detection of late events. Each event names the last event that its author had seen, so all
/// events that sort between the two became known later.
#[derive(Default)]
struct Witnesses {
    /// Author of each event, in the order of the events; `None` for reports.
    authors: Vec<Option<NodeId>>,
    places: HashMap<u128, usize>,
    /// Place of the last event of each author.
    own: BTreeMap<NodeId, usize>,
    /// For each place, the number of unseen ranges that begin there minus the number that end
    /// there.
    edges: BTreeMap<usize, i64>,
}

impl Witnesses {
    fn hear(&mut self, event: &Event, hash: EventHash) {
        let here = self.authors.len();
        let own = self.own.insert(event.author, here);
        // An author has seen its own events, whatever its next event names.
        if let Some(last) = self.places.get(&event.id.names(&event.author)) {
            let from = 1 + own.map_or(*last, |own| own.max(*last));
            if from < here {
                *self.edges.entry(from).or_default() += 1;
                *self.edges.entry(here).or_default() -= 1;
            }
        }
        self.places.insert(hash.name(), here);
        self.authors
            .push((!is_report(event)).then_some(event.author));
    }

    /// Counts the events of each author that the author of a later event had not seen.
    fn late(&self) -> BTreeMap<NodeId, u64> {
        let (mut late, mut open) = (BTreeMap::new(), 0);
        for (place, author) in self.authors.iter().enumerate() {
            open += self.edges.get(&place).unwrap_or(&0);
            if open > 0
                && let Some(author) = author
            {
                *late.entry(*author).or_default() += 1;
            }
        }
        late
    }
}
