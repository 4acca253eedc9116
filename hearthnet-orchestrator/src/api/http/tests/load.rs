//! Limits of connections and turns, lost hosts, and the end of a server.

use super::*;

#[test]
fn idle_connections_do_not_block_new_ones() {
    let house = house_with(settings(2, 4, 4), |http| {
        http.max_connections = 4;
        // No connection becomes idle within this test.
        http.client_deadline = Duration::from_secs(3600);
    });
    let half_a_head = |mut stream: TcpStream| {
        let _ = stream.write_all(b"GET /heal");
        stream
    };
    let idle: Vec<TcpStream> = (0..64).map(|_| half_a_head(house.connect())).collect();
    assert_eq!(house.get("/healthz", "").status, 200);
    assert_eq!(house.get("/metrics", "").status, 200);
    assert_eq!(house.chat(json!({})).status, 200);
    drop(idle);
}

#[test]
fn requests_beyond_the_limit_are_refused_but_health_checks_are_not() {
    let house = house_with(settings(2, 4, 4), |http| http.max_connections = 1);
    let first = house.begin_at_the_gate(CLOSE);
    let refused = house.chat(json!({}));
    assert_eq!(refused.error().1, "busy");
    assert!(refused.retry_after() >= 1);
    assert_eq!(house.get("/healthz", "").status, 200);
    house.fixture.gate.set(false);
    assert_eq!(rest(first).status, 200);
    assert_eq!(house.chat(json!({})).status, 200);
}

#[test]
fn beyond_the_queue_requests_are_told_when_to_come_again() {
    let house = house_with(settings(1, 1, 1), |_| {});
    house.fixture.gate.set(true);
    let mut clients = Vec::new();
    for running_and_waiting in [(1, 0), (1, 1)] {
        clients.push(house.begin(json!({}), CLOSE));
        house.fixture.until("taken", |load, _| {
            (load.running, load.waiting) == running_and_waiting
        });
    }
    let refused = house.chat(json!({}));
    assert_eq!(refused.error(), (429, "busy".into(), String::new()));
    assert!(refused.retry_after() >= 1);
    house.fixture.gate.set(false);
    let answers = clients.into_iter().map(|client| rest(client).json());
    let answers: Vec<Value> = answers.collect();
    assert_eq!(answers[0]["choices"], answers[1]["choices"]);
}

#[test]
fn by_default_the_queue_has_room_for_every_request_that_is_served() {
    let queue = ServiceSettings::default().turns;
    assert!(queue.waiting >= HttpSettings::default().max_connections);
}

#[test]
fn a_burst_of_fifty_calls_of_one_caller_waits_and_none_is_refused() {
    let house = house_with(ServiceSettings::default(), |_| {});
    house.fixture.gate.set(true);
    let burst: Vec<TcpStream> = (0..50).map(|_| house.begin(json!({}), CLOSE)).collect();
    house.fixture.until("all run or wait", |load, _| {
        load.running + load.waiting == 50
    });
    house.fixture.gate.set(false);
    for stream in burst {
        assert_eq!(rest(stream).status, 200);
    }
}

#[test]
fn a_request_that_waits_for_too_long_is_refused_in_the_format_of_its_api() {
    let house = house_with(
        ServiceSettings {
            longest_wait: Duration::from_millis(20),
            ..settings(1, 4, 4)
        },
        |_| {},
    );
    let running = house.begin_at_the_gate(CLOSE);
    let body = json!({"model": "tiny", "max_tokens": 4,
                      "messages": [{"role": "user", "content": "hello"}]});
    let ollamas = json!({"model": "tiny", "messages": body["messages"]});
    let responses = json!({"model": "tiny", "input": "hello", "stream": true});
    for (path, body, kind) in [
        ("/v1/chat/completions", &body, "/error/code"),
        ("/v1/messages", &body, "/error/type"),
        ("/v1/responses", &responses, "/error/code"),
        ("/api/chat", &ollamas, "/error"),
    ] {
        let refused = house.post(path, body);
        assert_eq!(refused.status, 429, "{path}");
        assert!((1..=60).contains(&refused.retry_after()), "{path}");
        let kind = refused.json().pointer(kind).cloned().unwrap();
        let expected = match path {
            "/v1/messages" => "rate_limit_error",
            "/api/chat" => "waited",
            _ => "busy",
        };
        assert!(kind.as_str().unwrap().contains(expected), "{path}: {kind}");
    }
    house.fixture.gate.set(false);
    assert_eq!(rest(running).status, 200);
}

#[test]
fn a_disconnected_client_frees_its_request() {
    let house = open();
    house.fixture.gate.set(true);
    let mut streaming = house.begin(json!({"stream": true}), "");
    // The head of the response has arrived: the chat runs.
    streaming.read_exact(&mut [0; 12]).unwrap();
    let plain = house.begin(json!({}), "");
    let waiting = house.begin(json!({}), "");
    house.fixture.until("two run, one waits", |load, _| {
        (load.running, load.waiting) == (2, 1)
    });
    drop(waiting);
    house
        .fixture
        .until("it has left the queue", |load, _| load.waiting == 0);
    drop(streaming);
    drop(plain);
    house.fixture.until_empty();
    assert_eq!(house.get("/healthz", "").json()["running"], 0);
}

#[test]
fn hosts_that_are_missing_or_lost_are_told_of_before_and_amid_a_stream() {
    let house = open();
    house.fixture.census.lock().room = 0;
    let stream = json!({"stream": true});
    assert_eq!(
        house.chat(stream.clone()).error(),
        (503, "shard_unavailable".into(), String::new())
    );
    let mut census = house.fixture.census.lock();
    census.room = usize::MAX;
    census.fail_after = Some(3);
    drop(census);
    let reply = house.chat(stream);
    assert_eq!(reply.status, 200);
    let last = reply.events().pop().unwrap();
    let last: Value = serde_json::from_str(last).expect("an error, not [DONE]");
    assert_eq!(last["error"]["code"], "shard_unavailable");
    house.fixture.census.lock().fail_after = Some(3);
    assert_eq!(house.chat(json!({})).error().0, 503);
}

#[test]
fn a_newcomer_hears_that_a_draining_service_stops_and_when_to_ask_again() {
    let house = open();
    let first = house.begin_at_the_gate(CLOSE);
    let service = house.fixture.service.clone();
    let draining = house
        .fixture
        .runtime
        .spawn(async move { service.drain(TIMEOUT).await });
    house.fixture.until("it drains", |load, _| load.draining);
    let refused = house.chat(json!({}));
    assert_eq!(
        (refused.status, refused.error().1.as_str()),
        (503, "shutting_down")
    );
    assert!(refused.retry_after() >= 1);
    house.fixture.gate.set(false);
    house.fixture.runtime.block_on(draining).unwrap();
    assert_eq!(rest(first).status, 200);
}

#[test]
fn closing_the_server_lets_running_answers_end() {
    let house = open();
    // The client keeps its connection: the server closes it.
    let stream = house.begin_at_the_gate("");
    let House { server, fixture } = house;
    let addr = server.local_addr();
    let closing = fixture.runtime.spawn(server.shutdown(TIMEOUT));
    fixture.gate.set(false);
    assert_eq!(rest(stream).status, 200);
    fixture.runtime.block_on(closing).unwrap();
    assert!(TcpStream::connect(addr).is_err());
}

#[test]
fn metrics_are_exported_for_prometheus() {
    let house = open();
    house.chat(json!({}));
    let reply = house.get("/metrics", "");
    assert!(reply.headers["content-type"].starts_with("text/plain; version=0.0.4"));
    for name in [
        "distributed_inference_pipeline_construct_seconds_bucket",
        "distributed_inference_first_token_seconds_bucket",
        "distributed_inference_tokens_per_second_bucket",
        "distributed_inference_failovers_total 0",
        "distributed_inference_fallback_to_local_total 0",
        "distributed_inference_shard_corruption_detected_total 0",
        "hearthnet_pipelines_running",
        "hearthnet_pipelines_waiting",
        "hearthnet_answers_total{code=\"ok\"}",
        "hearthnet_queue_wait_seconds_bucket",
    ] {
        assert!(reply.body.contains(name), "{name}: {}", reply.body);
    }
}
