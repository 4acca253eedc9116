//! What becomes of pipelines and their hosts, told once: an event of the flight record is counted as
//! well where there is a number for it, and whoever reads the answer hears of a failover.
//!
//! Nothing that is told carries anything of what was asked or answered.

use std::collections::BTreeSet;
use std::time::Instant;

use hearthnet_bus::NodeId;
use hearthnet_bus::flight::{Event, PipelineId, record};
use hearthnet_transport::Code;
use metrics::{Counter, Histogram, counter, histogram};
use parking_lot::Mutex;

use crate::backend::Run;
use crate::error::ChatError;
use crate::exact::Arithmetics;
use crate::frames::Frame;
use crate::times::whole_ms;

/// Something has happened.
pub(crate) fn tell(event: Event) {
    let counter = match &event {
        Event::HostPreempted { .. } => counter!("distributed_inference_preemptions_total"),
        Event::StaleAnswer { .. } => counter!("distributed_inference_stale_answers_total"),
        Event::FailedOver {
            host: Some(_),
            code,
            ..
        } => match *code == Code::LEAVING {
            true => counter!("distributed_inference_moves_total"),
            false => counter!("distributed_inference_failovers_total"),
        },
        // The flight record only.
        _ => Counter::noop(),
    };
    counter.increment(1);
    record(event);
}

/// Layers run elsewhere now, and the answer goes on.
pub(crate) struct Failover {
    pub(crate) pipeline: PipelineId,
    /// `<model_id>:<lo>-<hi>` of the layers.
    pub(crate) shard_id: String,
    /// Who had them; `None` when this machine took over all layers.
    pub(crate) from: Option<NodeId>,
    /// Node ids of who has them now, in order of layers; none when this machine has.
    pub(crate) to: Vec<String>,
    /// What went wrong; `leaving` when nothing did.
    pub(crate) code: Code,
    /// Positions that were computed again.
    pub(crate) replayed: u32,
    /// What they were computed with, and are now.
    pub(crate) before: Arithmetics,
    pub(crate) now: Arithmetics,
    /// When it was noticed.
    pub(crate) since: Instant,
}

impl Failover {
    pub(crate) fn tell(self, run: &mut Run<'_>) {
        let took = self.since.elapsed();
        tell(Event::FailedOver {
            pipeline: self.pipeline,
            host: self.from,
            shard: self.shard_id.as_str().into(),
            code: self.code.clone(),
            replacements: u32::try_from(self.to.len()).unwrap_or(u32::MAX),
            replayed: self.replayed,
            ms: whole_ms(took),
        });
        (run.notify)(Frame::ShardFailover {
            shard_id: self.shard_id,
            host: self.from.map(|node| node.to_string()),
            code: self.code,
            replacements: self.to,
            replayed: self.replayed,
            recovery_ms: took.as_secs_f64() * 1e3,
            arithmetic: (self.before != self.now).then_some((self.before, self.now)),
        });
    }
}

/// This machine answers instead of hosts, or goes on where they stopped.
pub(crate) fn fell_back(error: &ChatError, what: &str) {
    tracing::warn!(code = %error.code(), "{what} without hosts, on this machine: {error}");
    counter!("distributed_inference_fallback_to_local_total").increment(1);
}

/// How the round trips of a shard's decode steps are counted. It has a name of its own, unless too
/// many have: then it is one of the `other`.
pub(crate) fn shard_latency(shard_id: String) -> Histogram {
    static NAMES: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let name = bounded(&mut NAMES.lock(), shard_id);
    histogram!("distributed_inference_shard_latency_ms", "shard_id" => name)
}

/// Most shards with a name of their own. Each costs a histogram; more ranges than these in one
/// process are an experiment, or a host that advertises another one every minute.
const MOST_SHARDS: usize = 64;

fn bounded(names: &mut BTreeSet<String>, name: String) -> String {
    if !names.contains(&name) {
        if names.len() >= MOST_SHARDS {
            return "other".to_owned();
        }
        names.insert(name.clone());
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_cannot_make_more_numbers_than_there_is_room_for() {
        let mut names = BTreeSet::new();
        let counted: BTreeSet<String> = (0..1000)
            .map(|n| bounded(&mut names, format!("model:0-{n}")))
            .collect();
        assert_eq!(counted.len(), MOST_SHARDS + 1);
        assert_eq!(bounded(&mut names, "model:0-3".into()), "model:0-3");
    }
}
