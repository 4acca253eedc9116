//! Serving this process's record to others, and collecting theirs.

use std::sync::Arc;

use serde_json::{Value, json};

use super::ring::{Page, Stamp};
use crate::community::log::Level;
use crate::node::calls::{
    Answering, CallContext, CallError, CallLimits, CallStream, CapabilityDescriptor, FrameSink,
    Handler, Kind, Params, RegisterError, Registry,
};
use crate::{Capability, NodeId};

/// Name of the event that carries a [`Page`].
const PAGE: &str = "page";

/// Greatest age that can be asked for, in milliseconds: longer than any run.
const MAX_AGE_MS: i64 = 10 * 366 * 86_400_000;

/// Upper bound of pages collected from one node: about four times those of a full ring.
const MAX_PAGES: usize = 256;
/// Upper bound of records collected from one node. A full ring has at most 10,496.
const MAX_RECORDS: usize = 12_000;

/// Readers of this process's record; the handler of their calls.
#[derive(Debug, Clone)]
#[allow(clippy::exhaustive_enums)] // The server of the record chooses one.
pub enum Readers {
    /// Trusted members of the community. The record shows which nodes talk, and when, so plain
    /// members may not read it.
    Nodes,
    /// Callers of a host outside of any community, where there are no levels. A caller with the
    /// host's own key (the node here) reads everything, others only what
    /// [concerns](super::Event::concerns) them.
    Callers(NodeId),
    /// Programs on the node's own machine, whatever its level, under this name.
    Local(Capability),
}

impl Readers {
    /// Registers the capability for these readers.
    ///
    /// # Errors
    /// [`RegisterError`].
    pub fn register(self, registry: &Registry) -> Result<(), RegisterError> {
        registry.register(self.descriptor(), Arc::new(self))
    }

    /// Descriptor for these readers: [`Capability::diagnose`], or the local name.
    pub fn descriptor(&self) -> CapabilityDescriptor {
        let (name, summary, level) = match self {
            Self::Nodes => (
                Capability::diagnose(),
                "Returns this node's recent events: codes, ids and numbers, no texts.",
                Level::Trusted,
            ),
            Self::Callers(_) => (
                Capability::diagnose(),
                "Returns all recent events to the host's owner, and to callers their own.",
                Level::Member,
            ),
            Self::Local(name) => (
                name.clone(),
                "Returns recent events to programs on the node's own machine.",
                Level::Member,
            ),
        };
        let (min, max) = (0, MAX_AGE_MS);
        CapabilityDescriptor {
            streaming: true,
            limits: CallLimits {
                concurrent: 4,
                concurrent_per_caller: 2,
                seconds: 30,
            },
            params: Params::none().optional("age_ms", Kind::Integer { min, max }),
            ..CapabilityDescriptor::new(name, summary, Some(level))
        }
    }
}

impl Handler for Readers {
    fn call(&self, ctx: CallContext, params: Value, out: FrameSink) -> Answering<'_> {
        Box::pin(async move {
            let only: Option<NodeId> = match self {
                Self::Nodes => None,
                Self::Local(_) => {
                    ctx.require_local("may ask this")?;
                    None
                }
                Self::Callers(own) => (ctx.caller != *own).then_some(ctx.caller),
            };
            let age_ms = params["age_ms"].as_u64().unwrap_or(u64::MAX);
            let since = super::now().unix_ms.saturating_sub(age_ms);
            let mut from = 0;
            loop {
                let page = super::page(from, since, only.as_ref());
                let next = page.next;
                out.send(PAGE, &json!(page)).await?;
                match next {
                    Some(next) => from = next,
                    None => return Ok(json!({})),
                }
            }
        })
    }
}

/// Parameters of a call: records at most `age_ms` old.
pub fn params(age_ms: Option<u64>) -> Value {
    match age_ms {
        // The server refuses a value beyond its range.
        Some(age) => json!({"age_ms": age.min(MAX_AGE_MS as u64)}),
        None => json!({}),
    }
}

/// Collected record of one node.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // The merge reads every field.
pub struct Answer {
    /// This machine's clocks when the call was sent.
    pub asked: Stamp,
    /// This machine's clocks when the first page arrived.
    pub heard: Stamp,
    /// The first page, with the records of all pages.
    pub page: Page,
    /// Number of records that could not be decoded.
    pub unreadable: u64,
    /// True if the record was longer than the bounds of one node.
    pub cut: bool,
}

impl Answer {
    /// Collects pages up to the bounds above. Whatever the other node sends, the result has a
    /// bounded size and its records are in ascending order.
    ///
    /// # Errors
    /// The error of the call; `bad_request` if a page is not valid.
    pub async fn collect(asked: Stamp, mut stream: CallStream) -> Result<Self, CallError> {
        let mut all: Option<Self> = None;
        let mut pages = 0;
        while let Some(event) = stream.next().await? {
            let heard = super::now();
            pages += 1;
            if event.name != PAGE {
                continue;
            }
            let (mut page, unreadable) = read(event.data)
                .ok_or_else(|| CallError::bad_request("page", "is not a flight record"))?;
            let (run, records) = (page.run, std::mem::take(&mut page.records));
            let answer = all.get_or_insert(Self {
                asked,
                heard,
                page,
                unreadable: 0,
                cut: false,
            });
            answer.unreadable = answer.unreadable.saturating_add(unreadable);
            let last = answer.page.records.last().map_or(0, |record| record.seq);
            // A connection reaches a single run of the program, and a run uses each number once.
            let fits = answer.page.run == run
                && records.first().is_none_or(|first| first.seq > last)
                && records.is_sorted_by(|a, b| a.seq < b.seq);
            if !fits {
                return Err(CallError::bad_request(
                    "page",
                    "its records are out of order",
                ));
            }
            answer.page.records.extend(records);
            if pages >= MAX_PAGES || answer.page.records.len() > MAX_RECORDS {
                answer.page.records.truncate(MAX_RECORDS);
                answer.cut = true;
                break;
            }
        }
        all.ok_or_else(|| CallError::bad_request("page", "is missing"))
    }
}

/// Decodes a page and counts records that cannot be decoded, each by itself.
fn read(mut page: Value) -> Option<(Page, u64)> {
    let records = page.get_mut("records")?.take();
    *page.get_mut("records")? = json!([]);
    let mut page: Page = serde_json::from_value(page).ok()?;
    let mut unreadable = 0;
    let Value::Array(records) = records else {
        return None;
    };
    for record in records {
        match serde_json::from_value(record) {
            Ok(record) => page.records.push(record),
            Err(_) => unreadable += 1,
        }
    }
    Some((page, unreadable))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::flight::{Event, PipelineId, Ring};

    fn page() -> Value {
        let mut ring = Ring::new(7, Stamp::default());
        let pipeline = PipelineId::from_parts(1, 2);
        ring.push(Stamp::default(), Event::Cancelled { pipeline });
        ring.push(Stamp::default(), Event::PipelineEnded { pipeline });
        json!(ring.page(Stamp::default(), 0, 0, None))
    }

    #[test]
    fn a_page_comes_back_as_it_went() {
        let (read, unreadable) = read(page()).unwrap();
        assert_eq!((json!(read), unreadable), (page(), 0));
    }

    #[test]
    fn one_record_that_cannot_be_read_costs_no_other() {
        for broken in [
            json!(5),
            json!({"seq": -1}),
            json!({"seq": 1, "at": {"unix_ms": 1e300, "mono_us": 1}, "event": {"kind": "x"}}),
            json!({"seq": 3, "at": {"unix_ms": 1, "mono_us": 1},
                "event": {"kind": "cancelled", "pipeline": "\u{1b}[2J"}}),
        ] {
            let mut page = page();
            page["records"][1] = broken;
            let (page, unreadable) = read(page).unwrap();
            assert_eq!((page.records.len(), unreadable), (1, 1));
        }
    }

    #[test]
    fn an_invalid_page_is_refused() {
        for wrong in [json!(null), json!([]), json!({}), json!({"records": 3})] {
            assert!(read(wrong.clone()).is_none(), "{wrong}");
        }
    }
}
