//! Metrics of a host and of a caller, after a chat and after refused connections. Real model, real
//! processes, Prometheus' own parser.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::*;

/// Metrics at a URL.
struct Numbers(Value);

impl Numbers {
    fn at(url: &str) -> Self {
        Self(client("metrics_page.py", &[url]))
    }

    /// Value of a metric with these labels, in alphabetical order; 0 if it is missing.
    fn of(&self, name: &str) -> f64 {
        self.0["values"][name].as_f64().unwrap_or_default()
    }

    fn assert_some(&self, names: &[&str]) {
        for name in names {
            assert!(self.of(name) > 0.0, "{name}: {:#}", self.0["values"]);
        }
    }

    /// Polls until `name` is counted.
    fn until(url: &str, name: &str) -> Self {
        let mut numbers = Self::at(url);
        until(name, || {
            numbers = Self::at(url);
            numbers.of(name) > 0.0
        });
        numbers
    }
}

/// Checks a page of metrics as `promtool check metrics` does, if `HEARTHNET_TEST_PROMTOOL` names that
/// program.
#[track_caller]
fn assert_promtool_agrees(url: &str) {
    let Some(promtool) = std::env::var_os("HEARTHNET_TEST_PROMTOOL") else {
        skipped("tests/run finds no promtool for this machine");
        return;
    };
    let (address, path) = url
        .trim_start_matches("http://")
        .split_once('/')
        .expect("a path");
    let mut child = Command::new(promtool)
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    let page = http::get(address, &format!("/{path}"));
    stdin.write_all(page.as_bytes()).expect("it reads");
    drop(stdin);
    let checked = child.wait_with_output().expect("its end");
    // Each complaint is a line there.
    assert_eq!(text(&checked.stderr), "");
    assert!(checked.status.success());
}

/// Sends bytes that are not TLS to the host, and waits until it disconnects.
fn knock(address: &str) {
    let endpoint = address.split('#').next().expect("an endpoint");
    let mut stream = TcpStream::connect(endpoint).expect("it listens");
    stream.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
    let _ = stream.write_all(b"GET / HTTP/1.1\r\nHost: me\r\n\r\n\0\0\0\0\0");
    let mut sink = Vec::new();
    let _ = stream.read_to_end(&mut sink);
}

#[test]
fn a_host_and_its_caller_count_a_chat_and_refused_clients() {
    let (home, stranger) = (Home::new(), Home::new());
    let hosts = ["0-14", "15-29"].map(|layers| host(&home, layers, &gauges::SHOWN));
    let [first, second] = hosts.each_ref().map(|host| host.address.as_str());
    // The same address under another node's key.
    let endpoint = first.split('#').next().expect("an endpoint");
    let imposter = format!("{endpoint}#{}", stranger.node_id());
    let shards = ["--shard", first, "--shard", second, "--shard", &imposter];
    let service = Server::api(&home, &ENABLE, model(), &shards);
    let url = service.ready["url"].as_str().expect("a URL");
    let id = service.ready["models"][0].as_str().expect("a model");
    client("openai_http.py", &[url, id, "plain"]);

    // Refused clients: one without TLS, and one whose key is not admitted.
    knock(first);
    let refused = stranger.ask("Hello", &[&hosts[0]], &["--no-fallback"]);
    assert_fails(&refused, 4, "shard_unavailable");

    let host_url = hosts[0].process.ready["metrics"].as_str().expect("a URL");
    let host = Numbers::until(
        host_url,
        r#"hearthnet_transport_tls_failures_total{cause="not_tls",side="host"}"#,
    );
    host.assert_some(&[
        "hearthnet_shard_sessions",
        "hearthnet_shard_steps_total",
        r#"hearthnet_shard_rows_total{kind="decode"}"#,
        r#"hearthnet_shard_rows_total{kind="prefill"}"#,
        r#"hearthnet_shard_turn_seconds_count{kind="decode"}"#,
        "hearthnet_shard_queue_seconds_count",
        r#"hearthnet_shard_bytes_total{direction="in"}"#,
        r#"hearthnet_shard_bytes_total{direction="out"}"#,
        "hearthnet_shard_kv_budget_bytes",
        "hearthnet_shard_weight_bytes",
        "hearthnet_shard_loads_total",
        r#"hearthnet_transport_sessions{side="host"}"#,
        r#"hearthnet_transport_bytes_total{direction="in",side="host"}"#,
        r#"hearthnet_transport_bytes_total{direction="out",side="host"}"#,
        r#"hearthnet_transport_credit_chunks{side="host",state="granted"}"#,
        r#"hearthnet_transport_step_slots{side="host",state="granted"}"#,
        r#"hearthnet_transport_tls_failures_total{cause="not_admitted",side="host"}"#,
        r#"hearthnet_transport_refusals_total{code="not_tls",side="host"}"#,
        r#"hearthnet_transport_refusals_total{code="not_admitted",side="host"}"#,
    ]);
    // All gauges are zero when idle.
    for name in [
        "hearthnet_shard_steps_waiting",
        r#"hearthnet_transport_step_slots{side="host",state="used"}"#,
        r#"hearthnet_transport_credit_chunks{side="host",state="used"}"#,
        r#"hearthnet_transport_queued_bytes{side="host"}"#,
        "hearthnet_shard_evictions_total",
    ] {
        assert_eq!(host.0["values"][name].as_f64(), Some(0.0), "{name}");
    }
    assert_eq!(host.0["health"]["status"], "ok");
    assert_eq!(host.0["types"]["hearthnet_shard_turn_seconds"], "histogram");

    assert_promtool_agrees(host_url);

    let caller_url = url.replace("/v1", "/metrics");
    assert_promtool_agrees(&caller_url);
    let caller = Numbers::at(&caller_url);
    let shard = |layers: &str| {
        format!(r#"distributed_inference_shard_latency_seconds_count{{shard_id="{id}:{layers}"}}"#)
    };
    caller.assert_some(&[
        "distributed_inference_pipeline_construct_seconds_count",
        "distributed_inference_first_token_seconds_count",
        "distributed_inference_tokens_per_second_count",
        &shard("2-14"),
        &shard("15-29"),
        r#"hearthnet_answers_total{code="ok"}"#,
        r#"hearthnet_transport_sessions{side="caller"}"#,
        r#"hearthnet_transport_bytes_total{direction="out",side="caller"}"#,
        r#"hearthnet_transport_step_slots{side="caller",state="granted"}"#,
        r#"hearthnet_transport_tls_failures_total{cause="wrong_key",side="caller"}"#,
        r#"hearthnet_transport_refusals_total{code="identity_mismatch",side="caller"}"#,
    ]);
    for name in [
        "distributed_inference_failovers_total",
        "distributed_inference_fallback_to_local_total",
        "distributed_inference_shard_corruption_detected_total",
    ] {
        assert_eq!(caller.0["values"][name].as_f64(), Some(0.0), "{name}");
    }
}

#[test]
fn metrics_on_a_public_address_need_a_key() {
    let home = Home::new();
    let serve = ["shard", "serve", "--json", "--model", model()];
    let how = ["--layers", "0-1", "--metrics", "0.0.0.0:0"];
    let output = home.run(&[&ENABLE[..], &serve, &how].concat());
    assert_fails(&output, 2, "bad_config");
    assert_complains(&output, "key");
}
