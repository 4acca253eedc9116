//! The record as a capability: pages out, pages in.

use std::sync::Arc;

use serde_json::{Value, json};

use super::ring::{Page, Record, Stamp};
use crate::node::calls::{
    Answering, CallContext, CallError, CallLimits, CallStream, CapabilityDescriptor, FrameSink,
    Handler, Kind, Params, RegisterError, Registry, Trust,
};
use crate::{Capability, NodeId};

/// Name of the event that carries a [`Page`].
const PAGE: &str = "page";

/// How far back can be asked, in milliseconds: longer than any program runs.
const MAX_AGE_MS: i64 = 10 * 366 * 86_400_000;

/// Most pages that are taken from one node: four times what a full ring makes.
const MAX_PAGES: usize = 256;
/// Most records that are taken from one node: what a full ring holds.
const MAX_RECORDS: usize = 12_000;

/// Who may read this process's record, and how much of it; answers the calls.
#[derive(Debug, Clone)]
#[allow(clippy::exhaustive_enums)] // Chosen by whoever serves the record.
pub enum Readers {
    /// Other nodes of the community. The record tells who talks with whom and when: that is for
    /// those whom the community lets hold its layers, not for everyone whom it lets chat.
    Nodes,
    /// Callers of a host outside of any community, where there are no levels: who holds the
    /// host's own key, which this is, reads all of it, anyone else what
    /// [concerns](super::Event::concerns) him.
    Callers(NodeId),
    /// Programs on the node's own machine, whatever its level, under this name.
    Local(Capability),
}

impl Readers {
    /// Serves the record to them.
    ///
    /// # Errors
    /// [`RegisterError`].
    pub fn register(self, registry: &Registry) -> Result<(), RegisterError> {
        registry.register(self.descriptor(), Arc::new(self))
    }

    /// What is offered to them: [`Capability::diagnose`], or the local name.
    pub fn descriptor(&self) -> CapabilityDescriptor {
        let (name, summary, trust) = match self {
            Self::Nodes => (
                Capability::diagnose(),
                "Tells what happened here of late: codes, ids and numbers, no texts.",
                Trust::Trusted,
            ),
            Self::Callers(_) => (
                Capability::diagnose(),
                "Tells the host's owner what happened here of late, and callers what concerns them.",
                Trust::Member,
            ),
            Self::Local(name) => (
                name.clone(),
                "Tells programs on the node's own machine what happened here of late.",
                Trust::Member,
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
            ..CapabilityDescriptor::new(name, summary, trust)
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

/// What to ask for: everything that is at most so old.
pub fn params(age_ms: Option<u64>) -> Value {
    match age_ms {
        // The other side refuses what is beyond its range.
        Some(age) => json!({"age_ms": age.min(MAX_AGE_MS as u64)}),
        None => json!({}),
    }
}

/// One node's record, as far as it came.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // Read field by field by whoever lays records side by side.
pub struct Answer {
    /// This machine's clocks when the question went out.
    pub asked: Stamp,
    /// The other machine's clocks when it made the first page.
    pub answered: Stamp,
    /// This machine's clocks when that page came.
    pub heard: Stamp,
    /// When the other program began, by its clocks.
    pub began: Stamp,
    /// Drawn by the other program when it began: the same in all that one run of it answers.
    pub run: u64,
    /// Events that the other side does not keep any more.
    pub forgotten: u64,
    /// Whether the other side told only what concerns this one.
    pub partial: bool,
    /// Records that came and could not be read.
    pub unreadable: u64,
    /// Whether there was more than is taken from one node.
    pub cut: bool,
    /// In the order in which the other side numbered them.
    pub records: Vec<Record>,
}

impl Answer {
    /// Takes pages as they come, so many of them and so many records at most. Whatever the other
    /// side sends, what is returned is of bounded size, and its records are in ascending order.
    ///
    /// # Errors
    /// What the call failed with; `bad_request` if what came is no record.
    pub async fn collect(asked: Stamp, mut stream: CallStream) -> Result<Self, CallError> {
        let mut all: Option<Self> = None;
        let mut pages = 0;
        while let Some(event) = stream.next().await? {
            let heard = super::now();
            pages += 1;
            if event.name != PAGE {
                continue;
            }
            let (page, unreadable) = read(event.data)
                .ok_or_else(|| CallError::bad_request("page", "it is no flight record"))?;
            let answer = all.get_or_insert_with(|| Self {
                asked,
                answered: page.now,
                heard,
                began: page.began,
                run: page.run,
                forgotten: page.forgotten,
                partial: page.partial,
                unreadable: 0,
                cut: false,
                records: Vec::new(),
            });
            answer.unreadable = answer.unreadable.saturating_add(unreadable);
            let last = answer.records.last().map_or(0, |record| record.seq);
            // One connection is one run of one program; and a number comes once.
            let fits = answer.run == page.run
                && page.records.first().is_none_or(|first| first.seq > last)
                && page.records.is_sorted_by(|a, b| a.seq < b.seq);
            if !fits {
                return Err(CallError::bad_request(
                    "page",
                    "its records are in disorder",
                ));
            }
            answer.records.extend(page.records);
            if pages >= MAX_PAGES || answer.records.len() > MAX_RECORDS {
                answer.records.truncate(MAX_RECORDS);
                answer.cut = true;
                break;
            }
        }
        all.ok_or_else(|| CallError::bad_request("page", "there was none"))
    }
}

/// A page, and how many of its records could not be read: each stands for itself.
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
    fn what_is_no_page_is_refused() {
        for wrong in [json!(null), json!([]), json!({}), json!({"records": 3})] {
            assert!(read(wrong.clone()).is_none(), "{wrong}");
        }
    }
}
