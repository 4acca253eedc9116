//! Prometheus metrics of processes, as far as the tests need them.

use super::{Host, http};

/// Gauges that are zero in an idle host: streams, steps, KV pages, credit, bytes in flight.
/// Sessions with its callers may stay.
pub(crate) const HOST: [&str; 8] = [
    "hearthnet_shard_streams",
    "hearthnet_shard_steps_waiting",
    "hearthnet_shard_kv_bytes",
    "hearthnet_shard_kv_pages_used",
    "hearthnet_transport_credit_chunks{side=\"host\",state=\"used\"}",
    "hearthnet_transport_step_slots{side=\"host\",state=\"used\"}",
    "hearthnet_transport_queued_bytes{side=\"host\"}",
    "hearthnet_transport_buffered_bytes{side=\"host\"}",
];

/// Gauges that are zero in an idle service.
pub(crate) const SERVICE: [&str; 7] = [
    "hearthnet_pipelines_running",
    "hearthnet_pipelines_waiting",
    "hearthnet_conversations_kept",
    "hearthnet_transport_credit_chunks{side=\"caller\",state=\"used\"}",
    "hearthnet_transport_step_slots{side=\"caller\",state=\"used\"}",
    "hearthnet_transport_queued_bytes{side=\"caller\"}",
    "hearthnet_transport_buffered_bytes{side=\"caller\"}",
];

/// Arguments that make a host publish its metrics.
pub(crate) const SHOWN: [&str; 2] = ["--metrics", "127.0.0.1:0"];

/// Metrics address of such a host.
pub(crate) fn address(host: &Host) -> String {
    let url = host.process.ready["metrics"].as_str().expect("a URL");
    let address = url.trim_start_matches("http://");
    address.trim_end_matches("/metrics").to_owned()
}

/// Metrics of a process at one moment.
pub(crate) struct Gauges(String);

impl Gauges {
    pub(crate) fn at(address: &str) -> Self {
        Self::of(http::get(address, "/metrics"))
    }

    /// Metrics in Prometheus' text format.
    pub(crate) fn of(text: String) -> Self {
        Self(text)
    }

    /// Value of a metric by its name and labels; `None` if the process does not publish it.
    pub(crate) fn value(&self, name: &str) -> Option<f64> {
        let mut values = self
            .0
            .lines()
            .filter_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        values.next()?.parse().ok()
    }

    /// Value of a counter, which must exist.
    pub(crate) fn count(&self, name: &str) -> u64 {
        self.value(name)
            .unwrap_or_else(|| panic!("{name} is not told")) as u64
    }

    /// Names of those metrics that are not zero or not published.
    pub(crate) fn restless(&self, names: &[&str]) -> Vec<String> {
        names
            .iter()
            .map(|name| (name, self.value(name)))
            .filter(|(_, value)| *value != Some(0.0))
            .map(|(name, value)| format!("{name} {value:?}"))
            .collect()
    }
}
