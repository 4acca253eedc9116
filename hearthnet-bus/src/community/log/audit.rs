//! For people: every event and what became of it, a check of everything, an export.
//!
//! All three read through a connection of their own, so that a long report holds up nobody.

use std::collections::{BTreeMap, HashMap};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rusqlite::Connection;
use serde::Serialize;

use super::db;
use super::error::LogError;
use super::event::{Checked, Event, EventHash, Lane};
use super::fold::{Fold, NoEffect};
use super::store::EventLog;
use super::view::View;
use crate::NodeId;

/// One event, as `log show` and `log export` print it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Record {
    /// The hash of what its author signed.
    pub hash: EventHash,
    /// Its kind.
    pub kind: String,
    /// What became of it.
    pub status: Status,
    /// Its fields.
    #[serde(flatten)]
    pub event: Event,
    /// The signed bytes, base64 in JSON.
    #[serde(serialize_with = "base64")]
    pub raw: Vec<u8>,
}

/// What became of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// It changed the community.
    Effective,
    /// It did not: its author may not do this, or there was nothing to change.
    NoEffect(#[serde(serialize_with = "sentence")] NoEffect),
    /// An event of its author before it is missing.
    Waiting,
    /// Its author's history parts here.
    Fork,
    /// Ephemeral, the newest of its slot.
    Live,
}

/// The result of [`EventLog::verify`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verified {
    /// Durable events checked.
    pub durable: u64,
    /// Ephemeral events checked.
    pub ephemeral: u64,
    /// What is wrong, a sentence each. Empty: everything is as it should be.
    pub problems: Vec<String>,
    /// Of authors who have lost a level, or their place: how many events there are that whoever took it
    /// had not seen. They count for no more than their author may do now, wherever they sort.
    pub void: BTreeMap<NodeId, u64>,
    /// Of other authors: how many events there are that came to light when others had written what sorts
    /// after them. Such an author was away, or it has dated them back.
    pub late: BTreeMap<NodeId, u64>,
}

/// Most problems that are listed.
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

    /// Visits every event: the durable ones in the order of the log, then the ephemeral ones.
    /// `visit` says whether to go on.
    ///
    /// # Errors
    /// [`LogError::Corrupt`], what the disk says, or what `visit` returns.
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
            go_on = visit(Record {
                hash: EventHash::of(&raw).unwrap_or(EventHash::ZERO),
                kind: event.body.kind().to_owned(),
                status,
                event,
                raw,
            })?;
            Ok(go_on)
        })?;
        if !go_on {
            return Ok(());
        }
        db::ephemerals(&tx, |row| {
            if !go_on {
                return Ok(());
            }
            let event = Event::decode_stored(&row.raw)?;
            go_on = visit(Record {
                hash: row.hash,
                kind: event.body.kind().to_owned(),
                status: Status::Live,
                event,
                raw: row.raw,
            })?;
            Ok(())
        })
    }

    /// Checks everything again from the bytes on: the pages of the file, every hash and
    /// signature, every chain, and that the state is what the events say.
    ///
    /// # Errors
    /// If the file cannot be read at all. What is wrong with its content is in the result.
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
            let raw = match db::raw(&tx, arrival) {
                Ok(raw) => raw,
                Err(error) => {
                    found.problem(format!("{name}: {error}"));
                    return Ok(true);
                }
            };
            let event = match Event::verify_with(&raw, &mut checked) {
                Ok(event) => event,
                Err(error) => {
                    found.problem(format!("{name}: {error}"));
                    return Ok(true);
                }
            };
            let hash = EventHash::of(&raw).unwrap_or(EventHash::ZERO);
            if event.position() != at || event.community != view.community {
                found.problem(format!("{name} is stored in another one's place"));
            }
            dating.hear(&event, hash);
            let author = view.author(&at.author);
            if at.seq <= author.row.head {
                let tip = tips.insert(at.author, (at.seq, hash));
                let (seq, before) = tip.unwrap_or((0, EventHash::ZERO));
                if seq + 1 != at.seq || event.lane != (Lane::Durable { prev: before }) {
                    found.problem(format!("{name} does not follow the one before it"));
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
            Ok(())
        })?;
        (found.void, found.late) = dating.found();
        if view.fold_anew(&tx)?.state != view.fold.state {
            found.problem("the stored state is not what the events say");
        }
        Ok(found)
    }

    /// How many events of each author came to light when others had written what sorts after them, or taken
    /// its level: [`Verified::void`] and [`Verified::late`] together, without checking anything again.
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

/// Whose events are dated back, or may be.
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

    /// Takes the next event in the order, which counts if its author's history has it.
    fn hear(&mut self, event: &Event, hash: EventHash) {
        let author = self.view.authors.get(&event.author);
        if !author.is_some_and(|author| author.has(event.seq)) {
            return;
        }
        if self.replay.comes_too_late(event) {
            *self.void.entry(event.author).or_default() += 1;
        }
        // What it does is in the state.
        let _ = self.replay.again(event);
        if self.view.fold.knows(&event.author) {
            self.order.hear(event, hash);
        }
    }

    /// [`Verified::void`] and [`Verified::late`].
    fn found(self) -> (BTreeMap<NodeId, u64>, BTreeMap<NodeId, u64>) {
        let mut late = self.order.late();
        late.retain(|author, _| !self.void.contains_key(author));
        (self.void, late)
    }
}

/// What events say of what their authors had seen: each names the one that was the last for its author,
/// so that all between the two came to light later.
#[derive(Default)]
struct Witnesses {
    /// The events, in their order: who wrote each.
    authors: Vec<NodeId>,
    places: HashMap<u128, usize>,
    /// The place of the last event of each author.
    own: BTreeMap<NodeId, usize>,
    /// At each place, how many more (or fewer) stretches that somebody had not seen begin than end.
    edges: BTreeMap<usize, i64>,
}

impl Witnesses {
    /// Takes the next event in the order.
    fn hear(&mut self, event: &Event, hash: EventHash) {
        let here = self.authors.len();
        let own = self.own.insert(event.author, here);
        // Who has written something has seen it, whatever its next event says.
        if let Some(last) = self.places.get(&event.id.names(&event.author)) {
            let from = 1 + own.map_or(*last, |own| own.max(*last));
            if from < here {
                *self.edges.entry(from).or_default() += 1;
                *self.edges.entry(here).or_default() -= 1;
            }
        }
        self.places.insert(hash.name(), here);
        self.authors.push(event.author);
    }

    /// How many events of each author somebody who wrote later had not seen.
    fn late(&self) -> BTreeMap<NodeId, u64> {
        let (mut late, mut open) = (BTreeMap::new(), 0);
        for (place, author) in self.authors.iter().enumerate() {
            open += self.edges.get(&place).unwrap_or(&0);
            if open > 0 {
                *late.entry(*author).or_default() += 1;
            }
        }
        late
    }
}
