//! Reports of a host that starts, or fails to, and what it announces of its settings.

use hearthnet_testkit::raw;

use crate::{LoadPhase, StartProgress};

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_port_in_use_is_said_before_anything_is_loaded() {
    let host = Host::start().await;
    let mut config = config();
    config.listen = host.running.local_addr().to_string();
    let probe = Arc::new(Probe::default());
    let mut progress = Vec::new();
    let error = crate::ShardHost::start_on(
        config,
        &host_key(),
        served(),
        FakeSource(probe.clone()),
        &mut |step| progress.push(step),
    )
    .await
    .unwrap_err();
    assert!(matches!(error, StartError::Listen(_)), "{error}");
    assert_eq!(error.code(), "listen");
    assert_eq!(progress, []);
    assert_eq!(probe.loaded.load(Ordering::SeqCst), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_reports_its_progress_and_its_failure() {
    let probe = Arc::new(Probe::default());
    *probe.load_error.lock() = Some("tensor x is damaged".into());
    let mut progress = Vec::new();
    let source = FakeSource(probe.clone());
    let error = crate::ShardHost::start_on(config(), &host_key(), served(), source, &mut |step| {
        progress.push(step);
    })
    .await
    .unwrap_err();
    assert!(error.to_string().contains("tensor x is damaged"), "{error}");
    assert_eq!(error.code(), "weights_unavailable");
    let total = WEIGHT_BYTES;
    let (phase, done) = (LoadPhase::Verifying, total);
    assert_eq!(progress, [StartProgress { phase, done, total }]);
}

/// Other hosts of this process may be running; all have the default.
#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn the_engine_lets_other_threads_go_first() {
    let _host = Host::start().await;
    let mut seen = 0;
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let task = task.unwrap().path();
        let read = |file: &str| std::fs::read_to_string(task.join(file)).unwrap_or_default();
        if read("comm").trim() != "shard-compute" {
            continue;
        }
        // proc_pid_stat(5): after the name in brackets, the niceness is the 17th field.
        let stat = read("stat");
        let (_, fields) = stat.rsplit_once(')').unwrap_or_default();
        if let Some(niceness) = fields.split_whitespace().nth(16) {
            assert_eq!(niceness, "5");
            seen += 1;
        }
    }
    assert!(seen > 0, "this host has such a thread");
}

#[tokio::test]
async fn nonsense_settings_are_refused_by_name() {
    type Change = fn(&mut ServeConfig);
    let cases: [(&str, Change); 11] = [
        ("max_concurrent_streams", |c| c.max_concurrent_streams = 0),
        ("max_streams_per_caller", |c| c.max_streams_per_caller = 0),
        ("max_positions", |c| c.max_positions = Some(0)),
        ("max_waiting_steps", |c| c.max_waiting_steps = 0),
        ("max_waiting_steps_per_caller", |c| {
            c.max_waiting_steps_per_caller = 0;
        }),
        ("kv_share_per_caller", |c| c.kv_share_per_caller = 0),
        ("kv_share_per_caller", |c| c.kv_share_per_caller = 101),
        ("niceness", |c| c.niceness = -1),
        ("niceness", |c| c.niceness = 20),
        ("stream_idle", |c| c.stream_idle = Duration::ZERO),
        ("clock_skew_secs", |c| c.clock_skew_secs = 301),
    ];
    for (name, change) in cases {
        let mut config = config();
        change(&mut config);
        let source = FakeSource(Arc::new(Probe::default()));
        let started =
            crate::ShardHost::start_on(config, &host_key(), served(), source, &mut |_| {}).await;
        assert!(started.unwrap_err().to_string().starts_with(name));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn hello_announces_the_limits_of_the_hosts_queues() {
    let host = Host::start_with(|config| {
        config.max_waiting_steps = 7;
        config.max_waiting_steps_per_caller = 19;
        config.transport.send_buffer_bytes = 1 << 20;
    })
    .await;
    let key = caller_key();
    let credentials = raw::Credentials::of(&key.secret());
    let peer = raw::Peer::upgraded(host.running.local_addr(), &credentials).await;
    let mut peer = peer.unwrap();
    let hello = raw::Hello::new(PIPELINE, token(&key));
    peer.send(hello.frame()).await;
    let answer = peer.receive().await;
    assert!(answer.is(raw::kind::HELLO), "{answer:?}");
    for (name, limit) in [
        ("stream_steps", 7),
        ("caller_steps", 19),
        ("unread_bytes", 1 << 20),
    ] {
        assert_eq!(answer.number(name), Some(limit), "{name}");
    }
}
