//! Numbers for Prometheus: the names, what they mean, and how histograms are cut.
//!
//! [`NUMBERS`] is the one list of them, whichever crate counts: a test holds it against the
//! sources and against the dashboard.

use std::sync::OnceLock;
use std::time::Duration;

use metrics::{describe_counter, describe_gauge, describe_histogram};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

/// Milliseconds: a hop on loopback takes a tenth of one, a first token over slow hosts a minute.
const MILLISECONDS: &[f64] = &[
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0,
    10_000.0, 30_000.0, 60_000.0,
];
/// Seconds of the same range.
const SECONDS: &[f64] = &[
    0.0001, 0.000_25, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0,
];
/// Tokens per second: reading pace is about five.
const TOKENS_PER_SECOND: &[f64] = &[
    0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0,
];

/// How often histograms are summed up, so that a process that nobody asks for its numbers does
/// not remember every single one.
const UPKEEP: Duration = Duration::from_secs(5);

/// This process's numbers.
#[derive(Clone)]
pub struct Metrics(PrometheusHandle);

/// Why this process cannot count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("this process already counts for somebody else, or the system gave it no thread")]
pub struct OtherRecorder;

/// What a process does, and so which counters it begins at zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // The two sides of a pipeline.
pub enum Part {
    /// It asks hosts.
    Caller,
    /// It is one.
    Host,
}

impl Metrics {
    /// Counts from here on, for the whole process. Asked again, it returns the same. The plain
    /// counters of `part` begin at zero, so that the first failure is an increase and not a new
    /// line. What begins before, such as a session, may not be counted.
    ///
    /// # Errors
    /// [`OtherRecorder`].
    pub fn install(part: Part) -> Result<Self, OtherRecorder> {
        static INSTALLED: OnceLock<Result<Metrics, OtherRecorder>> = OnceLock::new();
        let metrics = INSTALLED.get_or_init(Self::build).clone()?;
        for number in NUMBERS {
            if number.kind == Kind::Counter && number.begins_with(part) {
                metrics::counter!(number.name).absolute(0);
            }
        }
        Ok(metrics)
    }

    fn build() -> Result<Self, OtherRecorder> {
        let mut builder = PrometheusBuilder::new();
        for (suffix, buckets) in [
            ("_ms", MILLISECONDS),
            ("_seconds", SECONDS),
            ("_tokens_per_second", TOKENS_PER_SECOND),
        ] {
            let matcher = Matcher::Suffix(suffix.to_owned());
            // The bounds above are not empty, which is all that can be wrong with them.
            builder = builder
                .set_buckets_for_metric(matcher, buckets)
                .map_err(|_| OtherRecorder)?;
        }
        let recorder = builder.build_recorder();
        let handle = recorder.handle();
        metrics::set_global_recorder(recorder).map_err(|_| OtherRecorder)?;
        for number in NUMBERS {
            match number.kind {
                Kind::Histogram => describe_histogram!(number.name, number.what),
                Kind::Gauge => describe_gauge!(number.name, number.what),
                Kind::Counter | Kind::Labelled => describe_counter!(number.name, number.what),
            }
        }
        let kept = handle.clone();
        // Not a task: numbers come from processes whose runtimes come and go, too.
        std::thread::Builder::new()
            .name("metrics-upkeep".into())
            .spawn(move || {
                loop {
                    std::thread::sleep(UPKEEP);
                    kept.run_upkeep();
                }
            })
            .map_err(|_| OtherRecorder)?;
        Ok(Self(handle))
    }

    /// The numbers now, in Prometheus' text format.
    pub fn render(&self) -> String {
        self.0.render()
    }
}

/// How a number behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Histogram,
    Gauge,
    /// A counter without labels.
    Counter,
    /// A counter with labels, of few values each.
    Labelled,
}

/// A number that there is.
struct Number {
    name: &'static str,
    kind: Kind,
    what: &'static str,
}

impl Number {
    fn begins_with(&self, part: Part) -> bool {
        self.name.starts_with("hearthnet_shard_") == (part == Part::Host)
    }
}

/// Every number of every process of this program.
#[rustfmt::skip] // A table, one number a line.
const NUMBERS: &[Number] = &[
    Number { kind: Kind::Histogram, name: "distributed_inference_pipeline_construct_ms", what: "From the request to a pipeline that takes rows" },
    Number { kind: Kind::Histogram, name: "distributed_inference_first_token_ms", what: "From the request to the first token" },
    Number { kind: Kind::Histogram, name: "distributed_inference_tokens_per_second", what: "Generated tokens per second after the first one" },
    Number { kind: Kind::Histogram, name: "distributed_inference_shard_latency_ms", what: "Round trip of a decode step, by shard; at most 64 shards have a name of their own" },
    Number { kind: Kind::Counter, name: "distributed_inference_failovers_total", what: "Hosts that failed in the middle of an answer and were replaced" },
    Number { kind: Kind::Counter, name: "distributed_inference_moves_total", what: "Hosts left in the middle of an answer because they were about to stop" },
    Number { kind: Kind::Counter, name: "distributed_inference_preemptions_total", what: "Sequences whose memory a host took back, to begin again later" },
    Number { kind: Kind::Counter, name: "distributed_inference_fallback_to_local_total", what: "Answers that went on on this machine" },
    Number { kind: Kind::Counter, name: "distributed_inference_shard_corruption_detected_total", what: "Rows from hosts that cannot be right" },
    Number { kind: Kind::Gauge, name: "distributed_inference_hosts", what: "Hosts that were asked, by what was seen of them: good, failing, quarantined" },
    Number { kind: Kind::Labelled, name: "distributed_inference_host_failures_total", what: "Failures of hosts, by kind" },
    Number { kind: Kind::Counter, name: "distributed_inference_stale_answers_total", what: "Answers of hosts to steps that were given up" },
    Number { kind: Kind::Labelled, name: "hearthnet_transport_late_results_total", what: "Results that came for steps that nobody waited for any more, and were dropped, by side" },
    Number { kind: Kind::Histogram, name: "hearthnet_queue_wait_ms", what: "From the request to its turn" },
    Number { kind: Kind::Gauge, name: "hearthnet_pipelines_running", what: "Chats that run" },
    Number { kind: Kind::Gauge, name: "hearthnet_pipelines_waiting", what: "Chats that wait for a turn" },
    Number { kind: Kind::Gauge, name: "hearthnet_conversations_kept", what: "Conversations kept for their next turn" },
    Number { kind: Kind::Labelled, name: "hearthnet_answers_total", what: "Chats that ended, by code: ok, or the error's" },
    Number { kind: Kind::Labelled, name: "hearthnet_refusals_total", what: "Requests that got no turn, by code" },
    Number { kind: Kind::Labelled, name: "hearthnet_tokens_total", what: "Tokens by kind: prompt, cached of these, completion" },
    Number { kind: Kind::Gauge, name: "hearthnet_http_connections", what: "HTTP connections open" },
    Number { kind: Kind::Labelled, name: "hearthnet_http_responses_total", what: "HTTP responses, by status" },

    Number { kind: Kind::Gauge, name: "hearthnet_shard_sessions", what: "Sessions of callers of this host" },
    Number { kind: Kind::Gauge, name: "hearthnet_shard_streams", what: "Streams open on this host" },
    Number { kind: Kind::Gauge, name: "hearthnet_shard_steps_waiting", what: "Steps that wait or are computed" },
    Number { kind: Kind::Gauge, name: "hearthnet_shard_kv_bytes", what: "Memory for keys and values in use" },
    Number { kind: Kind::Gauge, name: "hearthnet_shard_kv_budget_bytes", what: "Memory for keys and values that there is" },
    Number { kind: Kind::Gauge, name: "hearthnet_shard_kv_pages", what: "Pages of that memory" },
    Number { kind: Kind::Gauge, name: "hearthnet_shard_kv_pages_used", what: "Pages that streams hold" },
    Number { kind: Kind::Gauge, name: "hearthnet_shard_kv_pages_left", what: "Pages that no stream holds" },
    Number { kind: Kind::Counter, name: "hearthnet_shard_preempted_total", what: "Streams that had to give their pages to others" },
    Number { kind: Kind::Gauge, name: "hearthnet_shard_weight_bytes", what: "Weights in memory; 0 while they are put away" },
    Number { kind: Kind::Counter, name: "hearthnet_shard_steps_total", what: "Steps answered" },
    Number { kind: Kind::Labelled, name: "hearthnet_shard_rows_total", what: "Rows computed, by kind of step: decode (up to 8 rows), prefill" },
    Number { kind: Kind::Labelled, name: "hearthnet_shard_caller_rows_total", what: "Rows of answered steps, by caller; at most 64 callers have a name of their own" },
    Number { kind: Kind::Histogram, name: "hearthnet_shard_turn_seconds", what: "One batch through the layers, by kind" },
    Number { kind: Kind::Histogram, name: "hearthnet_shard_queue_seconds", what: "From a step's arrival to its turn" },
    Number { kind: Kind::Labelled, name: "hearthnet_shard_bytes_total", what: "Bytes of rows, by direction: in, out" },
    Number { kind: Kind::Counter, name: "hearthnet_shard_dropped_steps_total", what: "Steps dropped before compute, because their stream ended" },
    Number { kind: Kind::Labelled, name: "hearthnet_shard_errors_total", what: "Streams refused or ended by this host, by code" },
    Number { kind: Kind::Labelled, name: "hearthnet_shard_sessions_closed_total", what: "Sessions refused or ended by this host, by code" },
    Number { kind: Kind::Counter, name: "hearthnet_shard_loads_total", what: "Times that the weights were loaded" },
    Number { kind: Kind::Counter, name: "hearthnet_shard_evictions_total", what: "Times that the weights were put away for want of use" },

    Number { kind: Kind::Labelled, name: "hearthnet_log_refused_total", what: "Events from other members that this node's log did not take, by code" },

    Number { kind: Kind::Gauge, name: "hearthnet_transport_sessions", what: "Tensor sessions, by side: host, caller" },
    Number { kind: Kind::Gauge, name: "hearthnet_transport_sockets", what: "Connections between nodes for calls and gossip, by side and path" },
    Number { kind: Kind::Labelled, name: "hearthnet_transport_closed_total", what: "Connections that ended, by side, path, who ended it, and code" },
    Number { kind: Kind::Labelled, name: "hearthnet_transport_bytes_total", what: "Bytes of frames of tensor sessions, by side and direction" },
    Number { kind: Kind::Gauge, name: "hearthnet_transport_credit_chunks", what: "Chunks that may be in flight to peers, and are: granted, used" },
    Number { kind: Kind::Gauge, name: "hearthnet_transport_step_slots", what: "Steps that may be without an answer, and are: granted, used" },
    Number { kind: Kind::Gauge, name: "hearthnet_transport_queued_bytes", what: "Bytes that wait to be sent" },
    Number { kind: Kind::Gauge, name: "hearthnet_transport_buffered_bytes", what: "Bytes of tensors that came and were not taken yet" },
    Number { kind: Kind::Labelled, name: "hearthnet_transport_tls_failures_total", what: "TLS handshakes that failed, by side and cause" },
    Number { kind: Kind::Labelled, name: "hearthnet_transport_refusals_total", what: "Connections that did not become sessions, by side and code" },
];

#[cfg(test)]
mod tests;
