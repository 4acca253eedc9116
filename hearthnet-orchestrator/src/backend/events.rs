//! Events of pipelines and their hosts, reported in one place: written to the flight record,
//! counted in the metrics, and sent to the reader of the answer (failovers).
//!
//! No event contains any text of a prompt or an answer.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};

use hearthnet_bus::NodeId;
use hearthnet_bus::flight::{Event, PipelineId, record};
use hearthnet_transport::Code;
use metrics::{Counter, Histogram, counter, histogram};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::backend::Run;
use crate::error::ChatError;
use crate::exact::Arithmetics;
use crate::frames::Frame;
use crate::times::whole_ms;

static FAILOVERS: AtomicU64 = AtomicU64::new(0);

/// Number of times that other hosts, or this machine, took over layers in the middle of an answer,
/// since the start of this process.
pub fn failovers() -> u64 {
    FAILOVERS.load(Ordering::Relaxed)
}

/// Writes an event to the flight record and increments its metric, if there is one.
pub(crate) fn report_event(event: Event) {
    // Without hosts at the start of an answer, nothing is taken over.
    if let Event::FailedOver { host, replayed, .. } = &event
        && (host.is_some() || *replayed > 0)
    {
        FAILOVERS.fetch_add(1, Ordering::Relaxed);
    }
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
        // No metric for this event.
        _ => Counter::noop(),
    };
    counter.increment(1);
    record(event);
}

/// Move of layers to other hosts, or to this machine, while the answer continues.
pub(crate) struct Failover {
    pub(crate) pipeline: PipelineId,
    /// `<model_id>:<lo>-<hi>` of the layers.
    pub(crate) shard_id: String,
    /// Host that ran the layers; `None` if this machine took over all layers.
    pub(crate) from: Option<NodeId>,
    /// Node ids of the new hosts, in layer order; empty if this machine took over.
    pub(crate) to: Vec<String>,
    /// Code of the failure; `leaving` if the host did not fail.
    pub(crate) code: Code,
    pub(crate) replayed: u32,
    /// Arithmetics before the move, and after it.
    pub(crate) before: Arithmetics,
    pub(crate) now: Arithmetics,
    /// Moment at which the failure was noticed.
    pub(crate) since: Instant,
}

impl Failover {
    pub(crate) fn report(self, run: &mut Run<'_>) {
        let took = self.since.elapsed();
        report_event(Event::FailedOver {
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

/// Reports that this machine answers instead of the hosts, or continues their answer.
pub(crate) fn fell_back(error: &ChatError, what: &str) {
    tracing::warn!(code = %error.code(), "{what} without hosts, on this machine: {error}");
    counter!("distributed_inference_fallback_to_local_total").increment(1);
}

/// Histogram of a shard's decode round trips, in seconds. Shards beyond `MOST_SHARDS` share the label `other`.
pub(crate) fn shard_latency(shard_id: String) -> Histogram {
    static NAMES: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let name = bounded(&mut NAMES.lock(), shard_id);
    histogram!("distributed_inference_shard_latency_seconds", "shard_id" => name)
}

/// Maximum number of shards with their own label. Each costs a histogram; only an experiment or a
/// host that keeps advertising new ranges exceeds it.
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
    use hearthnet_bus::NodeKey;

    use super::*;

    #[test]
    fn layers_that_others_take_over_in_the_middle_of_an_answer_are_counted() {
        let event = |host, replayed| Event::FailedOver {
            pipeline: PipelineId::draw(),
            host,
            shard: "model:0-1".into(),
            code: Code::LEAVING,
            replacements: 1,
            replayed,
            ms: 1,
        };
        let host = NodeKey::from_secret(&[1; 32]).id();
        // Other tests may count as well.
        let before = failovers();
        report_event(event(Some(host), 0));
        report_event(event(None, 4));
        assert!(failovers() >= before + 2);
    }

    #[test]
    fn the_number_of_shard_metrics_is_bounded() {
        let mut names = BTreeSet::new();
        let counted: BTreeSet<String> = (0..1000)
            .map(|n| bounded(&mut names, format!("model:0-{n}")))
            .collect();
        assert_eq!(counted.len(), MOST_SHARDS + 1);
        assert_eq!(bounded(&mut names, "model:0-3".into()), "model:0-3");
    }
}
