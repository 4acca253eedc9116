//! Numbers for Prometheus: the names, what they mean, and how histograms are cut.

use std::sync::OnceLock;

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

/// This process's numbers.
#[derive(Clone)]
pub struct Metrics(PrometheusHandle);

/// Another recorder has been installed in this process already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("this process already counts for somebody else")]
pub struct OtherRecorder;

impl Metrics {
    /// Counts from here on, for the whole process. Asked again, it returns the same.
    ///
    /// # Errors
    /// [`OtherRecorder`].
    pub fn install() -> Result<Self, OtherRecorder> {
        static INSTALLED: OnceLock<Result<Metrics, OtherRecorder>> = OnceLock::new();
        INSTALLED.get_or_init(Self::build).clone()
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
        describe();
        Ok(Self(handle))
    }

    /// The numbers now, in Prometheus' text format.
    pub fn render(&self) -> String {
        self.0.render()
    }

    /// Sums up what was recorded since the last time, so that a process that nobody asks for
    /// its numbers does not remember every single one. To be called every few seconds.
    pub fn upkeep(&self) {
        self.0.run_upkeep();
    }
}

/// Says what each number is, and lets counters without labels begin at zero, so that the first
/// failure is an increase and not a new line.
fn describe() {
    for (name, what) in HISTOGRAMS {
        describe_histogram!(*name, *what);
    }
    for (name, what) in GAUGES {
        describe_gauge!(*name, *what);
    }
    for (name, what) in COUNTERS {
        describe_counter!(*name, *what);
        metrics::counter!(*name).absolute(0);
    }
    for (name, what) in LABELLED {
        describe_counter!(*name, *what);
    }
}

const HISTOGRAMS: &[(&str, &str)] = &[
    (
        "distributed_inference_pipeline_construct_ms",
        "From the request to a pipeline that takes rows",
    ),
    (
        "distributed_inference_first_token_ms",
        "From the request to the first token",
    ),
    (
        "distributed_inference_tokens_per_second",
        "Generated tokens per second after the first one",
    ),
    (
        "distributed_inference_shard_latency_ms",
        "Round trip of a decode step, by shard",
    ),
    ("hearthnet_queue_wait_ms", "From the request to its turn"),
];

const GAUGES: &[(&str, &str)] = &[
    ("hearthnet_pipelines_running", "Chats that run"),
    ("hearthnet_pipelines_waiting", "Chats that wait for a turn"),
    (
        "hearthnet_conversations_kept",
        "Conversations kept for their next turn",
    ),
    ("hearthnet_http_connections", "Connections open"),
];

const COUNTERS: &[(&str, &str)] = &[
    (
        "distributed_inference_failovers_total",
        "Hosts replaced in the middle of an answer",
    ),
    (
        "distributed_inference_fallback_to_local_total",
        "Answers that went on on this machine",
    ),
    (
        "distributed_inference_shard_corruption_detected_total",
        "Rows from hosts that cannot be right",
    ),
    (
        "distributed_inference_stale_answers_total",
        "Answers of hosts to steps that were given up",
    ),
];

/// Counters with a label of few values.
const LABELLED: &[(&str, &str)] = &[
    (
        "hearthnet_answers_total",
        "Chats that ended, by code: ok, or the error's",
    ),
    (
        "hearthnet_refusals_total",
        "Requests that got no turn, by code",
    ),
    (
        "hearthnet_tokens_total",
        "Tokens by kind: prompt, cached of these, completion",
    ),
    ("hearthnet_http_responses_total", "Responses, by status"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dashboard_shows_only_numbers_that_there_are() {
        let text = include_str!("../../../config/grafana-dashboard.json");
        let dashboard: serde_json::Value = serde_json::from_str(text).unwrap();
        let known: Vec<&str> = [HISTOGRAMS, GAUGES, COUNTERS, LABELLED]
            .concat()
            .iter()
            .map(|(name, _)| *name)
            .collect();
        let panels = dashboard["panels"].as_array().unwrap();
        let mut shown = 0;
        for target in panels.iter().flat_map(|p| p["targets"].as_array().unwrap()) {
            let expr = target["expr"].as_str().unwrap();
            let words = expr.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            for name in words.filter(|word| {
                word.starts_with("distributed_inference_") || word.starts_with("hearthnet_")
            }) {
                assert!(known.contains(&name.trim_end_matches("_bucket")), "{name}");
                shown += 1;
            }
        }
        assert!(
            shown >= known.len() - 1,
            "every number is shown but the stale answers"
        );
    }
}
