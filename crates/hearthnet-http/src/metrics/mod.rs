//! Prometheus metrics: names, descriptions and histogram buckets.
//!
//! [`NUMBERS`] lists the metrics of all crates; a test compares it with the sources and the
//! dashboard.

use std::sync::OnceLock;
use std::time::Duration;

use metrics::{describe_counter, describe_gauge, describe_histogram};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

/// Seconds: from 0.1 ms for a hop on loopback to a minute for a first token over slow hosts.
const SECONDS: &[f64] = &[
    0.0001, 0.000_25, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0, 30.0, 60.0,
];
/// Tokens per second; reading speed is about five.
const TOKENS_PER_SECOND: &[f64] = &[
    0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0,
];

/// Interval at which histograms are aggregated, so that samples do not pile up in a process that is
/// never scraped.
const UPKEEP: Duration = Duration::from_secs(5);

/// Metrics of this process.
#[derive(Clone)]
pub struct Metrics(PrometheusHandle);

/// Why metrics could not be installed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("another metrics recorder is installed in this process, or no thread could be started")]
pub struct OtherRecorder;

/// Role of a process, which selects the counters that start at zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // The two sides of a pipeline.
pub enum Part {
    Caller,
    Host,
}

impl Metrics {
    /// Installs the metrics of the whole process; further calls return the same. The plain counters
    /// of `part` start at zero, so that the first failure is an increase and not a new series.
    /// Events before this call may not be counted.
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
            ("_seconds", SECONDS),
            ("_tokens_per_second", TOKENS_PER_SECOND),
        ] {
            let matcher = Matcher::Suffix(suffix.to_owned());
            // Only empty bounds are refused, and these are not.
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
        // A thread and not a task: metrics also come from processes whose runtimes come and go.
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

    /// The metrics in Prometheus' text format.
    pub fn render(&self) -> String {
        self.0.render()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Histogram,
    Gauge,
    Counter,
    /// A counter with labels, each with few values.
    Labelled,
}

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

/// Every metric of every process of this program.
#[rustfmt::skip] // A table, one number a line.
const NUMBERS: &[Number] = &[
    Number { kind: Kind::Histogram, name: "distributed_inference_pipeline_construct_seconds", what: "From the request to a pipeline that is ready for rows" },
    Number { kind: Kind::Histogram, name: "distributed_inference_first_token_seconds", what: "From the request to the first token" },
    Number { kind: Kind::Histogram, name: "distributed_inference_tokens_per_second", what: "Generated tokens per second after the first one" },
    Number { kind: Kind::Histogram, name: "distributed_inference_shard_latency_seconds", what: "Round trip of a decode step, by shard; at most 64 shards have a name of their own" },
    Number { kind: Kind::Counter, name: "distributed_inference_failovers_total", what: "Hosts that failed in the middle of an answer and were replaced" },
    Number { kind: Kind::Counter, name: "distributed_inference_moves_total", what: "Hosts replaced in the middle of an answer because they were about to stop" },
    Number { kind: Kind::Counter, name: "distributed_inference_preemptions_total", what: "Sequences preempted by a host for lack of memory, to be restarted later" },
    Number { kind: Kind::Counter, name: "distributed_inference_fallback_to_local_total", what: "Answers that continued on this machine" },
    Number { kind: Kind::Counter, name: "distributed_inference_shard_corruption_detected_total", what: "Invalid rows from hosts" },
    Number { kind: Kind::Gauge, name: "distributed_inference_hosts", what: "Hosts that were called, by state: good, failing, quarantined" },
    Number { kind: Kind::Labelled, name: "distributed_inference_host_failures_total", what: "Failures of hosts, by kind" },
    Number { kind: Kind::Counter, name: "distributed_inference_stale_answers_total", what: "Step results of hosts that arrived after the step was abandoned" },
    Number { kind: Kind::Labelled, name: "hearthnet_transport_late_results_total", what: "Results dropped because their step was no longer awaited, by side" },
    Number { kind: Kind::Histogram, name: "hearthnet_queue_wait_seconds", what: "From the request to its start" },
    Number { kind: Kind::Gauge, name: "hearthnet_pipelines_running", what: "Chats that run" },
    Number { kind: Kind::Gauge, name: "hearthnet_pipelines_waiting", what: "Chats that wait for their start" },
    Number { kind: Kind::Gauge, name: "hearthnet_conversations_kept", what: "Conversations kept for their next turn" },
    Number { kind: Kind::Labelled, name: "hearthnet_answers_total", what: "Chats that ended, by code: ok, or the error's" },
    Number { kind: Kind::Labelled, name: "hearthnet_refusals_total", what: "Requests that were refused, by code" },
    Number { kind: Kind::Labelled, name: "hearthnet_tokens_total", what: "Tokens by kind: prompt, cached of these, completion" },
    Number { kind: Kind::Gauge, name: "hearthnet_http_connections", what: "HTTP connections open" },
    Number { kind: Kind::Labelled, name: "hearthnet_http_responses_total", what: "HTTP responses, by status" },

    Number { kind: Kind::Gauge, name: "hearthnet_shard_sessions", what: "Sessions of callers of this host" },
    Number { kind: Kind::Gauge, name: "hearthnet_shard_streams", what: "Streams open on this host" },
    Number { kind: Kind::Gauge, name: "hearthnet_shard_steps_waiting", what: "Steps that wait or are computed" },
    Number { kind: Kind::Gauge, name: "hearthnet_shard_kv_bytes", what: "Memory for keys and values in use" },
    Number { kind: Kind::Gauge, name: "hearthnet_shard_kv_budget_bytes", what: "Memory available for keys and values" },
    Number { kind: Kind::Gauge, name: "hearthnet_shard_kv_pages", what: "Pages of that memory" },
    Number { kind: Kind::Gauge, name: "hearthnet_shard_kv_pages_used", what: "Pages that streams hold" },
    Number { kind: Kind::Gauge, name: "hearthnet_shard_kv_pages_left", what: "Pages that no stream holds" },
    Number { kind: Kind::Counter, name: "hearthnet_shard_preempted_total", what: "Streams preempted for lack of memory pages" },
    Number { kind: Kind::Gauge, name: "hearthnet_shard_weight_bytes", what: "Weights in memory; 0 while they are unloaded" },
    Number { kind: Kind::Counter, name: "hearthnet_shard_steps_total", what: "Steps answered" },
    Number { kind: Kind::Labelled, name: "hearthnet_shard_rows_total", what: "Rows computed, by kind of step: decode (up to 8 rows), prefill" },
    Number { kind: Kind::Labelled, name: "hearthnet_shard_caller_rows_total", what: "Rows of answered steps, by caller; at most 64 callers have a name of their own" },
    Number { kind: Kind::Histogram, name: "hearthnet_shard_turn_seconds", what: "One batch through the layers, by kind" },
    Number { kind: Kind::Histogram, name: "hearthnet_shard_queue_seconds", what: "From a step's arrival to its batch" },
    Number { kind: Kind::Labelled, name: "hearthnet_shard_bytes_total", what: "Bytes of rows, by direction: in, out" },
    Number { kind: Kind::Counter, name: "hearthnet_shard_dropped_steps_total", what: "Steps dropped before compute, because their stream ended" },
    Number { kind: Kind::Labelled, name: "hearthnet_shard_errors_total", what: "Streams refused or ended by this host, by code" },
    Number { kind: Kind::Labelled, name: "hearthnet_shard_sessions_closed_total", what: "Sessions refused or ended by this host, by code" },
    Number { kind: Kind::Counter, name: "hearthnet_shard_loads_total", what: "Times that the weights were loaded" },
    Number { kind: Kind::Counter, name: "hearthnet_shard_evictions_total", what: "Times that idle weights were unloaded" },

    Number { kind: Kind::Labelled, name: "hearthnet_log_refused_total", what: "Events from other members that this node's log refused, by code" },
    Number { kind: Kind::Counter, name: "hearthnet_weights_sent_bytes_total", what: "Bytes of weights sent to members" },

    Number { kind: Kind::Gauge, name: "hearthnet_transport_sessions", what: "Tensor sessions, by side: host, caller" },
    Number { kind: Kind::Gauge, name: "hearthnet_transport_sockets", what: "Connections between nodes for calls, gossip and weights, by side and path" },
    Number { kind: Kind::Labelled, name: "hearthnet_transport_closed_total", what: "Connections that ended, by side, path, who ended it, and code" },
    Number { kind: Kind::Labelled, name: "hearthnet_transport_bytes_total", what: "Bytes of frames of tensor sessions, by side and direction" },
    Number { kind: Kind::Gauge, name: "hearthnet_transport_credit_chunks", what: "Chunk credit to peers: granted, used" },
    Number { kind: Kind::Gauge, name: "hearthnet_transport_step_slots", what: "Slots for unanswered steps: granted, used" },
    Number { kind: Kind::Gauge, name: "hearthnet_transport_queued_bytes", what: "Bytes that wait to be sent" },
    Number { kind: Kind::Gauge, name: "hearthnet_transport_buffered_bytes", what: "Bytes of received tensors that were not taken yet" },
    Number { kind: Kind::Labelled, name: "hearthnet_transport_tls_failures_total", what: "TLS handshakes that failed, by side and cause" },
    Number { kind: Kind::Labelled, name: "hearthnet_transport_refusals_total", what: "Connections that did not become sessions, by side and code" },
];

#[cfg(test)]
mod tests;
