//! Ring of the last events of each class, with one numbering.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::event::{Class, Event};
use crate::NodeId;

/// Upper bound of records per page.
pub const MAX_PAGE_RECORDS: usize = 256;

/// Upper bound of record bytes per page, as the ring counts them. JSON takes up to five times as
/// many; a message of the bus has at most 256 KiB.
pub const MAX_PAGE_BYTES: usize = 40 * 1024;

/// A point in time, by both clocks of a machine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::exhaustive_structs)] // Complete by design.
pub struct Stamp {
    /// Unix time in milliseconds, by the machine's adjustable clock.
    pub unix_ms: u64,
    /// Microseconds of a monotonic clock that runs during suspend, from an arbitrary start.
    pub mono_us: u64,
}

/// A recorded event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::exhaustive_structs)] // Part of the wire format.
pub struct Record {
    /// Number within this run of the program, from 1.
    pub seq: u64,
    /// Time of the first occurrence.
    pub at: Stamp,
    /// Number of consecutive occurrences.
    #[serde(default = "once", skip_serializing_if = "is_once")]
    pub times: u32,
    pub event: Event,
}

fn once() -> u32 {
    1
}

#[allow(clippy::trivially_copy_pass_by_ref)] // Signature required by serde.
fn is_once(times: &u32) -> bool {
    *times == 1
}

/// A page of a node's record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::exhaustive_structs)] // Collectors read every field.
pub struct Page {
    /// Random number of the program's run: numbers of different runs are not comparable.
    pub run: u64,
    /// Start of the program.
    pub began: Stamp,
    /// Time at which the page was made.
    pub now: Stamp,
    /// Recorded events that are no longer kept, of all callers.
    pub forgotten: u64,
    /// True if the page holds only events that [concern](Event::concerns) the caller.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub partial: bool,
    /// First number of the next page; absent on the last page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<u64>,
    /// In order of their numbers.
    pub records: Vec<Record>,
}

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
    /// Upper bounds of records and bytes. A chat over three hosts makes about ten events at its
    /// caller and four on each host, so these hold some hundreds of chats.
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
    /// An empty ring of the run `run`, started at `began`.
    pub fn new(run: u64, began: Stamp) -> Self {
        Self {
            run,
            began,
            next_seq: 1,
            forgotten: 0,
            parts: Default::default(),
        }
    }

    /// Records an event. If the last event of its class is equal, only its count is increased.
    pub fn push(&mut self, at: Stamp, event: Event) {
        let class = event.class();
        let Some(part) = self.parts.get_mut(class as usize) else {
            return;
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

    /// First page of the records from number `from` on that happened at or after `since_unix_ms`:
    /// all, or those that [concern](Event::concerns) one caller.
    pub fn page(&self, now: Stamp, from: u64, since_unix_ms: u64, caller: Option<&NodeId>) -> Page {
        let mut parts = self.parts.each_ref().map(|part| {
            let first = part.records.partition_point(|record| record.seq < from);
            part.records.range(first..).peekable()
        });
        let (mut records, mut bytes, mut next) = (Vec::new(), 0, None);
        // Each part is sorted: take the record with the lowest number of all heads.
        while let Some(record) = parts
            .iter_mut()
            .filter_map(|part| Some((part.peek()?.seq, part)))
            .min_by_key(|(seq, _)| *seq)
            .and_then(|(_, part)| part.next())
        {
            // The clock may have been set since: filter by the record's age.
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
