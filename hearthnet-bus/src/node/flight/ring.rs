//! What is kept: the last events of each class, in one order.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::event::{Class, Event};
use crate::NodeId;

/// Most records of one page.
pub const MAX_PAGE_RECORDS: usize = 256;

/// Most bytes of records that one page holds, as the ring counts them. JSON makes up to five
/// times as much of a record; a message of the bus carries 256 KiB.
pub const MAX_PAGE_BYTES: usize = 40 * 1024;

/// A moment, by both clocks of a machine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::exhaustive_structs)] // Two clocks, and no third.
pub struct Stamp {
    /// Unix time in milliseconds, as far as the machine is set right.
    pub unix_ms: u64,
    /// Microseconds of a clock that nobody sets and that goes on in sleep, from an arbitrary
    /// beginning.
    pub mono_us: u64,
}

/// An event as it is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::exhaustive_structs)] // What is kept of an event, whatever it is.
pub struct Record {
    /// Its number in this run of the program, from 1.
    pub seq: u64,
    /// When it happened, or happened first.
    pub at: Stamp,
    /// How often in a row, if more than once.
    #[serde(default = "once", skip_serializing_if = "is_once")]
    pub times: u32,
    /// What happened.
    pub event: Event,
}

fn once() -> u32 {
    1
}

#[allow(clippy::trivially_copy_pass_by_ref)] // As serde asks for it.
fn is_once(times: &u32) -> bool {
    *times == 1
}

/// A piece of a node's record, as one answer carries it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::exhaustive_structs)] // Read field by field by whoever collects.
pub struct Page {
    /// Drawn when the program began: records of two runs are not one's.
    pub run: u64,
    /// When the program began.
    pub began: Stamp,
    /// When this page was made.
    pub now: Stamp,
    /// Events that were recorded and are not kept any more, whomever they concerned.
    pub forgotten: u64,
    /// Whether only what [concerns](Event::concerns) the asker is in it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub partial: bool,
    /// The number to ask from for the next page; absent if there is no more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<u64>,
    /// In the order in which they happened.
    pub records: Vec<Record>,
}

/// The last events of each class.
#[derive(Debug)]
pub struct Ring {
    run: u64,
    began: Stamp,
    next_seq: u64,
    forgotten: u64,
    parts: [Part; Class::ALL.len()],
}

#[derive(Debug, Default)]
struct Part {
    records: VecDeque<Record>,
    bytes: usize,
}

impl Class {
    /// Most records that are kept, and most bytes. A chat over three hosts makes some ten
    /// events with its caller and four on each host, so these are the last hundreds of chats.
    fn most(self) -> (usize, usize) {
        match self {
            Self::Pipelines | Self::Host => (4096, 1 << 20),
            Self::Node => (2048, 512 << 10),
            Self::Strangers => (256, 64 << 10),
        }
    }
}

fn weight(event: &Event) -> usize {
    size_of::<Record>() + event.name_bytes()
}

impl Ring {
    /// An empty one, of a program that began at `began` and goes by the number `run`.
    pub fn new(run: u64, began: Stamp) -> Self {
        Self {
            run,
            began,
            next_seq: 1,
            forgotten: 0,
            parts: Default::default(),
        }
    }

    /// Keeps an event. The same event again, with nothing else of its class in between, is
    /// counted and not kept twice.
    pub fn push(&mut self, at: Stamp, event: Event) {
        let class = event.class();
        let [pipelines, host, node, strangers] = &mut self.parts;
        let part = match class {
            Class::Pipelines => pipelines,
            Class::Host => host,
            Class::Node => node,
            Class::Strangers => strangers,
        };
        if let Some(last) = part.records.back_mut()
            && last.event == event
        {
            last.times = last.times.saturating_add(1);
            return;
        }
        let seq = self.next_seq;
        self.next_seq += 1;
        part.bytes += weight(&event);
        part.records.push_back(Record {
            seq,
            at,
            times: 1,
            event,
        });
        let (records, bytes) = class.most();
        while part.records.len() > records || part.bytes > bytes {
            let Some(gone) = part.records.pop_front() else {
                break;
            };
            part.bytes = part.bytes.saturating_sub(weight(&gone.event));
            self.forgotten += 1;
        }
    }

    /// The first records from number `from` on that happened at or after `since_unix_ms`: all of
    /// them, or those that [concern](Event::concerns) one caller.
    pub fn page(&self, now: Stamp, from: u64, since_unix_ms: u64, caller: Option<&NodeId>) -> Page {
        let mut parts = self.parts.each_ref().map(|part| {
            let first = part.records.partition_point(|record| record.seq < from);
            part.records.range(first..).peekable()
        });
        let (mut records, mut bytes, mut next) = (Vec::new(), 0, None);
        // The parts are in order each; the earliest of their heads is next.
        while let Some(record) = parts
            .iter_mut()
            .filter_map(|part| Some((part.peek()?.seq, part)))
            .min_by_key(|(seq, _)| *seq)
            .and_then(|(_, part)| part.next())
        {
            // The clock may have been set since: a record is left out for its age alone.
            let age_ms = now.mono_us.saturating_sub(record.at.mono_us) / 1000;
            if now.unix_ms.saturating_sub(age_ms) < since_unix_ms
                || caller.is_some_and(|caller| !record.event.concerns(caller))
            {
                continue;
            }
            bytes += weight(&record.event);
            if records.len() >= MAX_PAGE_RECORDS || bytes > MAX_PAGE_BYTES {
                next = Some(record.seq);
                break;
            }
            records.push(record.clone());
        }
        Page {
            run: self.run,
            began: self.began,
            now,
            forgotten: self.forgotten,
            partial: caller.is_some(),
            next,
            records,
        }
    }
}
