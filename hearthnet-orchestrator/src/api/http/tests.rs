//! HTTP interface over a tiny real model, tested through a socket.

mod answers;
mod apis;
mod exact;
mod vectors;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;

use hearthnet_http::{ApiKey, KeyLimits, NamedKey, NamedKeys, Part};

use super::*;
use crate::api::fields::with;
use crate::service::ServiceSettings;
use crate::service::tests::{Fixture, TIMEOUT, fixture, settings};

/// Header of a request that is the last one on its connection.
const CLOSE: &str = "Connection: close\r\n";

/// HTTP server of a fixture.
struct House {
    server: HttpServer,
    fixture: Fixture,
}

fn house(fixture: Fixture, settings: HttpSettings) -> House {
    let settings = HttpSettings {
        listen: "127.0.0.1:0".into(),
        ..settings
    };
    let metrics = Metrics::install(Part::Caller).unwrap();
    let start = serve(
        fixture.service.clone(),
        Some(metrics),
        Router::new(),
        &settings,
    );
    let server = fixture.runtime.block_on(start).unwrap();
    House { server, fixture }
}

/// House with other settings of HTTP than the default ones.
fn house_with(service: ServiceSettings, change: impl FnOnce(&mut HttpSettings)) -> House {
    let mut http = HttpSettings::default();
    change(&mut http);
    house(fixture(service), http)
}

fn open() -> House {
    house_with(settings(2, 4, 4), |_| {})
}

struct Reply {
    status: u16,
    headers: BTreeMap<String, String>,
    body: String,
}

impl Reply {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// Code and param of an error object.
    fn error(&self) -> (u16, String, String) {
        let error = &self.json()["error"];
        assert!(error["message"].as_str().is_some_and(|m| !m.is_empty()));
        assert!(error["type"].is_string());
        let text = |name: &str| error[name].as_str().unwrap_or_default().to_owned();
        (self.status, text("code"), text("param"))
    }

    /// Data of the events, including `[DONE]`.
    fn events(&self) -> Vec<&str> {
        assert_eq!(self.headers["content-type"], "text/event-stream");
        let events = self.body.split("\n\n").filter(|event| !event.is_empty());
        let data = events.map(|event| event.strip_prefix("data: ").expect("a data event"));
        data.collect()
    }

    /// Chunks of a complete stream.
    fn chunks(&self) -> Vec<Value> {
        let mut events = self.events();
        assert_eq!(events.pop(), Some("[DONE]"));
        let chunks = events.into_iter().map(serde_json::from_str);
        chunks.collect::<Result<_, _>>().unwrap()
    }
}

impl House {
    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.server.local_addr()).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream
    }

    /// Sends bytes and reads until the server closes.
    fn raw(&self, request: &str) -> Reply {
        let mut stream = self.connect();
        // A server that refuses early may close before it has read the whole request.
        let _ = stream.write_all(request.as_bytes());
        let mut bytes = Vec::new();
        let _ = stream.read_to_end(&mut bytes);
        parse(&String::from_utf8(bytes).unwrap())
    }

    fn get(&self, path: &str, headers: &str) -> Reply {
        self.raw(&format!(
            "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n"
        ))
    }

    fn post(&self, path: &str, body: &Value) -> Reply {
        self.raw(&post(path, &body.to_string(), CLOSE))
    }

    fn chat(&self, extra: Value) -> Reply {
        self.post("/v1/chat/completions", &ask(extra))
    }

    /// Sends a chat request and does not read its response.
    fn begin(&self, extra: Value, headers: &str) -> TcpStream {
        let mut stream = self.connect();
        let body = ask(extra).to_string();
        let request = post("/v1/chat/completions", &body, headers);
        stream.write_all(request.as_bytes()).unwrap();
        stream
    }

    /// As [`Self::begin`]; its chat then runs behind the shut gate.
    fn begin_at_the_gate(&self, headers: &str) -> TcpStream {
        self.fixture.gate.set(true);
        let stream = self.begin(json!({}), headers);
        self.fixture.until("it runs", |load, _| load.running == 1);
        stream
    }
}

/// Reads a response to the end of its connection.
fn rest(mut stream: TcpStream) -> Reply {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    parse(&text)
}

fn post(path: &str, body: &str, headers: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n{headers}\r\n{body}",
        body.len()
    )
}

/// Chat request with a deterministic answer.
fn ask(extra: Value) -> Value {
    let body = json!({
        "model": "tiny", "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 12, "temperature": 0,
    });
    with(body, extra)
}

fn parse(text: &str) -> Reply {
    let (head, body) = text
        .split_once("\r\n\r\n")
        .unwrap_or_else(|| panic!("no head: {text:?}"));
    let mut lines = head.lines();
    let status = lines.next().unwrap().split(' ').nth(1).unwrap();
    let status = status.parse().unwrap();
    let headers: BTreeMap<String, String> = lines
        .map(|line| line.split_once(": ").unwrap())
        .map(|(name, value)| (name.to_lowercase(), value.to_owned()))
        .collect();
    let mut body = body.to_owned();
    if headers
        .get("transfer-encoding")
        .is_some_and(|kind| kind == "chunked")
    {
        let (mut rest, mut whole) = (body.as_str(), String::new());
        while let Some((size, data)) = rest.split_once("\r\n") {
            let size = usize::from_str_radix(size, 16).unwrap();
            whole.push_str(&data[..size]);
            rest = &data[size + 2..];
            if size == 0 {
                break;
            }
        }
        body = whole;
    }
    Reply {
        status,
        headers,
        body,
    }
}

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
    assert!(refused.headers["retry-after"].parse::<u64>().unwrap() >= 1);
    assert_eq!(house.get("/healthz", "").status, 200);
    house.fixture.gate.set(false);
    assert_eq!(rest(first).status, 200);
    assert_eq!(house.chat(json!({})).status, 200);
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
    assert!(refused.headers["retry-after"].parse::<u64>().unwrap() >= 1);
    house.fixture.gate.set(false);
    house.fixture.runtime.block_on(draining).unwrap();
    assert_eq!(rest(first).status, 200);
}

#[test]
fn models_are_listed_and_found() {
    let house = open();
    let list = house.get("/v1/models", "").json();
    assert_eq!(
        (&list["object"], &list["data"][0]["id"]),
        (&json!("list"), &json!("tiny"))
    );
    assert_eq!(house.get("/v1/models/tiny", "").json()["object"], "model");
    let missing = house.get("/v1/models/none", "").error();
    assert_eq!(missing, (404, "model_not_found".into(), "model".into()));
}

#[test]
fn every_refusal_has_its_status_code_and_param() {
    let house = open();
    for (extra, status, code, param) in [
        (json!({"model": "none"}), 404, "model_not_found", "model"),
        (
            json!({"temperature": 3}),
            400,
            "invalid_value",
            "temperature",
        ),
        (json!({"tools": [1]}), 400, "invalid_value", "tools[0]"),
        (json!({"n": 9}), 400, "invalid_value", "n"),
        // Of a token that this model does not have.
        (
            json!({"logit_bias": {"9999999": 1}}),
            400,
            "bad_request",
            "",
        ),
        (json!({"top_k": -2}), 400, "invalid_value", "top_k"),
        // Refused by the compiler, for a chat that had its turn.
        (
            json!({"json_schema": {"not": {}}}),
            400,
            "unsupported_parameter",
            "json_schema",
        ),
        (
            json!({"structured_outputs": {"regex": "("}}),
            400,
            "invalid_value",
            "structured_outputs",
        ),
        (
            json!({"grammar": "x".repeat(70_000)}),
            400,
            "invalid_value",
            "grammar",
        ),
    ] {
        assert_eq!(
            house.chat(extra).error(),
            (status, code.into(), param.into())
        );
    }
    let long = json!({"messages": [{"role": "user", "content": "long ".repeat(300)}]});
    let long = house.chat(long);
    assert_eq!(long.error().1, "context_length_exceeded");
    let said = long.json()["error"]["message"].as_str().unwrap().to_owned();
    // LangChain and LiteLLM look for the first words.
    let begin = "This model's maximum context length is 256 tokens. However, ";
    assert!(said.starts_with(begin), "{said}");
    let not_json = house.raw(&post("/v1/chat/completions", "{", CLOSE));
    assert_eq!(
        not_json.error(),
        (400, "invalid_json".into(), String::new())
    );
    assert_eq!(house.get("/v2", "").error().0, 404);
    let no_text = house.get("/v1/models/%ff", "").error();
    assert_eq!(no_text, (404, "model_not_found".into(), "model".into()));
    assert_eq!(house.get("/v1/chat/completions", "").error().0, 405);
    let typed = |kind: &str| {
        let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n";
        house.raw(&format!("{head}{kind}Connection: close\r\n\r\n"))
    };
    let form = typed("Content-Type: application/x-www-form-urlencoded\r\n");
    assert_eq!(form.error().0, 415);
    // Without a type, as some clients of Ollama's send it, it is read as JSON.
    assert_eq!(typed("").error().1, "invalid_json");
}

#[test]
fn a_method_that_a_path_does_not_take_is_refused_and_no_page_is_let_in() {
    let house = open();
    let ask = |method: &str, path: &str, headers: &str| {
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n"
        );
        let reply = house.raw(&request);
        let cors = reply
            .headers
            .keys()
            .find(|name| name.starts_with("access-control"));
        assert_eq!(cors, None, "{method} {path}");
        reply
    };
    // CORS preflight of a page from another origin.
    let preflight = "Origin: https://evil.example\r\nAccess-Control-Request-Method: POST\r\n\
                     Access-Control-Request-Headers: content-type\r\n";
    for (method, path, allow) in [
        ("OPTIONS", "/v1/chat/completions", "POST"),
        ("GET", "/v1/completions", "POST"),
        ("DELETE", "/v1/models", "GET,HEAD"),
        ("POST", "/healthz", "GET,HEAD"),
    ] {
        let reply = ask(method, path, "");
        let refused = (405, "method_not_allowed".into(), String::new());
        assert_eq!(reply.error(), refused, "{method} {path}");
        assert_eq!(reply.headers["allow"], allow);
        if path != "/healthz" {
            let refused = (403, "forbidden_origin".into(), String::new());
            assert_eq!(
                ask(method, path, preflight).error(),
                refused,
                "{method} {path}"
            );
        }
    }
    for path in ["/v1/models", "/healthz", "/metrics"] {
        let reply = ask("HEAD", path, "");
        assert_eq!((reply.status, reply.body.as_str()), (200, ""), "{path}");
    }
    let well = ask("GET", "/healthz", preflight);
    assert_eq!((well.status, well.json()), (200, json!({"status": "ok"})));
}

#[test]
fn a_body_beyond_the_limit_is_refused_declared_or_not() {
    let house = house_with(settings(1, 1, 1), |http| http.max_body_bytes = 1000);
    let long = json!({"metadata": "x".repeat(2000)});
    assert_eq!(house.chat(long).error().1, "request_too_large");
    let chunk = format!("{:x}\r\n{}\r\n", 600, "x".repeat(600));
    let chunked = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n{chunk}{chunk}0\r\n\r\n"
    );
    assert_eq!(house.raw(&chunked).error().0, 413);
}

#[test]
fn a_body_that_a_refusal_leaves_unread_spoils_no_later_request_of_its_client() {
    let house = house_with(settings(1, 1, 1), |http| http.max_body_bytes = 5000);
    let json = "Content-Type: application/json\r\n";
    let refusals = [
        ("POST /v1/models", "evil.example", json, 403),
        ("POST /v1/images", "localhost", json, 404),
        ("PUT /v1/completions", "localhost", json, 405),
        ("POST /v1/completions", "localhost", json, 413),
        (
            "POST /v1/completions",
            "localhost",
            "Content-Type: text/plain\r\n",
            415,
        ),
        ("POST /healthz", "localhost", json, 405),
    ];
    for (line, host, kind, status) in refusals {
        for (bytes, goes_on) in [(10_000, true), (200_000, false), (4 << 20, false)] {
            let body = "x".repeat(bytes);
            let mut stream = house.connect();
            let head = format!("{line} HTTP/1.1\r\nHost: {host}\r\n{kind}");
            let request = format!("{head}Content-Length: {bytes}\r\n\r\n{body}");
            // The whole body is sent: a client that reads the response only afterwards still gets
            // it.
            stream.write_all(request.as_bytes()).unwrap();
            let refused = one_reply(&mut stream);
            assert_eq!(refused.status, status, "{line}");
            let closes = refused
                .headers
                .get("connection")
                .is_some_and(|c| c == "close");
            assert_eq!(closes, !goes_on, "{line}, {bytes} bytes");
            if goes_on {
                let next = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n";
                stream.write_all(next).unwrap();
                assert_eq!(one_reply(&mut stream).status, 200);
            } else {
                assert_eq!(stream.read(&mut [0]).unwrap(), 0, "the end, and no reset");
            }
        }
    }
    // A body held back by `Expect` is not requested.
    let held_back = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000\r\n\
                     Content-Type: text/plain\r\nExpect: 100-continue\r\n\r\n";
    let refused = house.raw(held_back);
    assert_eq!(
        (refused.status, refused.headers["connection"].as_str()),
        (415, "close")
    );
}

/// Reads one response, by its `Content-Length`.
fn one_reply(stream: &mut TcpStream) -> Reply {
    let mut bytes = Vec::new();
    loop {
        let mut more = [0; 4096];
        let count = stream.read(&mut more).unwrap();
        bytes.extend(&more[..count]);
        let text = std::str::from_utf8(&bytes).unwrap();
        assert!(count > 0, "it ended: {text}");
        if let Some((_, body)) = text.split_once("\r\n\r\n") {
            let reply = parse(text);
            if body.len() == reply.headers["content-length"].parse::<usize>().unwrap() {
                return reply;
            }
        }
    }
}

#[test]
fn a_body_that_breaks_off_is_not_said_to_be_too_large() {
    let house = open();
    let broken = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n\
                  Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n\
                  no length\r\n";
    assert_eq!(
        house.raw(broken).error(),
        (400, "invalid_json".into(), String::new())
    );
}

#[test]
fn a_request_that_does_not_arrive_ends_with_its_connection() {
    let deadline = Duration::from_millis(50);
    let house = house_with(settings(1, 1, 1), |http| http.client_deadline = deadline);
    let half_a_body = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n\
                       Content-Type: application/json\r\nContent-Length: 10\r\n\r\n{";
    assert_eq!(
        house.raw(half_a_body).error(),
        (408, "request_timeout".into(), String::new())
    );
    // An incomplete head gets no response: the connection closes.
    let mut stream = house.connect();
    stream.write_all(b"GET / HTTP/1.1\r\nHo").unwrap();
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
}

#[test]
fn with_an_api_key_other_requests_are_refused() {
    let key = ApiKey::new(" sixteen-bytes-or-more\n");
    let house = house_with(settings(1, 1, 1), |http| http.api_key = key);
    for wrong in [
        "",
        "Authorization: Bearer nope\r\n",
        "Authorization: Basic sixteen-bytes-or-more\r\n",
    ] {
        let reply = house.get("/v1/models", wrong);
        assert_eq!(reply.error().1, "invalid_api_key");
        assert_eq!(reply.headers["www-authenticate"], "Bearer");
    }
    let right = "Authorization: Bearer sixteen-bytes-or-more\r\n";
    assert_eq!(house.get("/v1/models", right).status, 200);
    assert_eq!(house.get("/metrics", "").status, 401);
    // The status is public; the load needs the key.
    let health = house.get("/healthz", "");
    assert_eq!(
        (health.status, health.json()),
        (200, json!({"status": "ok"}))
    );
    assert_eq!(house.get("/healthz", right).json()["running"], 0);
    assert!(ApiKey::new("too short").is_none());
    assert!(ApiKey::new("long enough, but with spaces").is_none());
}

#[test]
fn without_a_key_other_machines_and_other_names_are_not_served() {
    let fixture = fixture(settings(1, 1, 1));
    let everywhere = HttpSettings {
        listen: "0.0.0.0:0".into(),
        ..HttpSettings::default()
    };
    let start = serve(fixture.service.clone(), None, Router::new(), &everywhere);
    let refused = fixture.runtime.block_on(start).err();
    assert!(matches!(refused, Some(HttpError::KeyNeeded(_))));
    let house = house(fixture, HttpSettings::default());
    for (host, status) in [
        ("evil.example", 403),
        ("localhost.evil.example:80", 403),
        ("127.0.0.1.evil.example", 403),
        ("LOCALHOST:7602", 200),
        ("127.0.0.1", 200),
        ("[::1]:7602", 200),
    ] {
        let request =
            format!("GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        assert_eq!(house.raw(&request).status, status, "{host}");
    }
    // An absolute request target overrides the `Host` header.
    let elsewhere = "GET http://evil.example/v1/models HTTP/1.1\r\nHost: localhost\r\n\
                     Connection: close\r\n\r\n";
    assert_eq!(house.raw(elsewhere).status, 403);
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
    assert!(refused.headers["retry-after"].parse::<u64>().unwrap() >= 1);
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
        let after: u64 = refused.headers["retry-after"].parse().unwrap();
        assert!((1..=60).contains(&after), "{path}");
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
fn a_named_key_has_limits_and_turns_of_its_own_and_changes_nothing() {
    let named = |name: &str, key: &str, requests| NamedKey {
        name: name.to_owned(),
        key: ApiKey::new(key).unwrap(),
        limits: KeyLimits {
            requests,
            ..KeyLimits::default()
        },
    };
    let (one, other, owners) = (
        "one-one-one-one-one",
        "other-other-other",
        "owner-owner-owner",
    );
    let all = vec![named("one", one, Some(1)), named("other", other, None)];
    let keys = NamedKeys::watch("/nowhere".into(), move || Ok(all.clone())).unwrap();
    let house = house_with(settings(1, 8, 8), |http| {
        http.api_key = ApiKey::new(owners);
        http.named_keys = Some(keys.clone());
    });
    let head = |key: &str| format!("{CLOSE}Authorization: Bearer {key}\r\n");
    let running = house.begin_at_the_gate(&head(owners));
    let waiting = [one, other, other].map(|key| {
        let before = house.fixture.service.load().waiting;
        let stream = house.begin(json!({}), &head(key));
        house
            .fixture
            .until("it waits", |load, _| load.waiting == before + 1);
        stream
    });
    let refused = rest(house.begin(json!({}), &head(one)));
    let code = "rate_limit_exceeded".to_owned();
    assert_eq!(refused.error(), (429, code, String::new()));
    assert!(refused.headers["retry-after"].parse::<u64>().unwrap() >= 1);
    house.fixture.gate.set(false);
    assert!(
        std::iter::once(running)
            .chain(waiting)
            .all(|it| rest(it).status == 200)
    );
    let uses = keys.uses();
    assert_eq!(
        (uses[0].requests, uses[0].refused, uses[0].running),
        (1, 1, 0)
    );
    assert_eq!((uses[1].requests, uses[1].refused), (2, 0));
    assert!(uses[0].tokens > 12 && uses[1].tokens == 2 * uses[0].tokens);

    let change = |key: &str| {
        let request = post("/hearthnet/v1/pause", "{}", &head(key));
        house.raw(&request).error()
    };
    assert_eq!(
        (change(one).0, change(one).1.as_str()),
        (403, "unauthorized")
    );
    // This server has no such path.
    assert_eq!(change(owners).0, 404);
    assert_eq!(change("another-key-of-many").0, 401);
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
fn an_ipv6_network_is_one_caller_whose_machines_are_kept_apart() {
    let at = |text: &str| Client::new(text.parse().unwrap(), None, 1);
    let bounds = |client: &Client| who(client, true);
    let (one, other) = (at("2001:db8::1"), at("2001:db8::2"));
    assert_eq!(bounds(&one), bounds(&other));
    assert_ne!(bounds(&one), bounds(&at("2001:db8:0:1::1")));
    assert_ne!(bounds(&at("192.168.1.1")), bounds(&at("192.168.1.2")));
    let [one, other] = [one, other].map(|client| caller(&client, true, "ann"));
    assert_eq!(one.principal.identity, other.principal.identity);
    assert_ne!(one.principal, other.principal);
    assert_ne!(one.held_by, other.held_by);
}

/// Pages of a test.
static PAGES: [hearthnet_http::Page; 1] = [hearthnet_http::Page {
    path: "/",
    kind: "text/html; charset=utf-8",
    bytes: b"<!doctype html><title>page</title>",
}];

#[test]
fn a_page_needs_no_key_is_cached_by_its_content_and_opens_by_address_only() {
    let key = "a-key-of-sixteen-bytes-or-more";
    let house = house_with(settings(1, 1, 1), |http| {
        http.pages = &PAGES;
        http.api_key = ApiKey::new(key);
    });
    let page = house.get("/", "");
    assert_eq!((page.status, page.body.as_bytes()), (200, PAGES[0].bytes));
    let policy = &page.headers["content-security-policy"];
    assert!(policy.starts_with("default-src 'none'; script-src 'self';"));
    for (name, value) in [
        ("content-type", "text/html; charset=utf-8"),
        ("cache-control", "no-cache"),
        ("referrer-policy", "no-referrer"),
        ("x-content-type-options", "nosniff"),
        ("cross-origin-opener-policy", "same-origin"),
        ("cross-origin-resource-policy", "same-origin"),
    ] {
        assert_eq!(page.headers[name], value);
    }
    let tag = format!("If-None-Match: {}\r\n", page.headers["etag"]);
    let again = house.get("/", &tag);
    assert_eq!((again.status, again.body.as_str()), (304, ""));
    assert_eq!(house.get("/", "If-None-Match: \"other\"\r\n").status, 200);
    // Everything else needs the key.
    assert_eq!(house.get("/v1/models", "").status, 401);
    let at = |host: &str| {
        house.raw(&format!(
            "GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        ))
    };
    assert_eq!(at("192.168.0.9:7602").status, 200);
    assert_eq!(at("evil.example").error().1, "forbidden_host");

    let local = house_with(settings(1, 1, 1), |http| http.pages = &PAGES);
    assert_eq!(local.get("/", "").status, 200);
    let lan = local.raw("GET / HTTP/1.1\r\nHost: 192.168.0.9\r\nConnection: close\r\n\r\n");
    assert_eq!(lan.error().1, "forbidden_host");
    let cross = local.get("/v1/models", "Sec-Fetch-Site: cross-site\r\n");
    assert_eq!(cross.error().1, "forbidden_origin");
}

#[test]
fn a_stream_tells_its_hosts_in_comments_if_asked() {
    let house = open();
    let body = ask(json!({"stream": true})).to_string();
    let asked = format!("X-Hearthnet-Trace: 1\r\n{CLOSE}");
    let reply = house.raw(&post("/v1/chat/completions", &body, &asked));
    let mut traces = reply
        .body
        .lines()
        .filter_map(|line| line.strip_prefix(": hearthnet "));
    let last: Value = serde_json::from_str(traces.next_back().expect("a comment")).unwrap();
    assert_eq!(last["event"], "done");
    assert!(last["data"]["timings"]["tokens_per_second"].is_number());
    assert!(last["data"].get("text").is_none());
    let plain = house.raw(&post("/v1/chat/completions", &body, CLOSE));
    assert!(!plain.body.contains(": hearthnet "));
}

#[test]
fn a_listed_origin_may_use_the_api_and_others_may_not() {
    let house = house_with(settings(2, 4, 4), |http| {
        http.api_key = ApiKey::new("0123456789abcdef");
        http.cors_origins = vec!["http://app.example:3000".into()];
    });
    let send = |line: &str, headers: &str| {
        house.raw(&format!(
            "{line} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n{headers}\r\n"
        ))
    };
    let listed = "Origin: http://app.example:3000\r\nSec-Fetch-Site: cross-site\r\n";
    let other = "Origin: http://app.example\r\nSec-Fetch-Site: cross-site\r\n";
    let key = "Authorization: Bearer 0123456789abcdef\r\n";
    let asks = "Access-Control-Request-Method: POST\r\n\
                Access-Control-Request-Headers: authorization,content-type\r\n";
    let chat = "OPTIONS /v1/chat/completions";
    let allowed = send(chat, &format!("{listed}{asks}"));
    assert_eq!(allowed.status, 204);
    let header = |name: &str| allowed.headers[name].as_str();
    assert_eq!(
        header("access-control-allow-origin"),
        "http://app.example:3000"
    );
    assert_eq!(
        header("access-control-allow-headers"),
        "authorization,content-type"
    );
    assert_eq!(header("vary"), "origin");
    let models = send("GET /v1/models", &format!("{listed}{key}"));
    assert_eq!(models.status, 200);
    assert!(models.headers.contains_key("access-control-allow-origin"));
    // The page's script can read why it is refused.
    let keyless = send("GET /v1/models", listed);
    assert_eq!(keyless.status, 401);
    assert!(keyless.headers.contains_key("access-control-allow-origin"));
    for (line, headers) in [
        (chat, format!("{other}{asks}{key}")),
        ("GET /v1/models", format!("{other}{key}")),
        ("GET /metrics", format!("{listed}{key}")),
        ("POST /hearthnet/v1/pause", format!("{listed}{key}")),
    ] {
        let refused = send(line, &headers);
        assert_eq!(refused.error().1, "forbidden_origin", "{line}");
        assert!(!refused.headers.contains_key("access-control-allow-origin"));
    }
}

#[test]
fn a_listed_host_name_is_served_and_similar_ones_are_not() {
    let house = house_with(settings(1, 1, 1), |http| {
        http.allowed_hosts = vec!["host.docker.internal".into()];
    });
    for (host, status) in [
        ("host.docker.internal", 200),
        ("Host.Docker.Internal:7602", 200),
        ("localhost", 200),
        ("evil.host.docker.internal", 403),
        ("host.docker.internal.evil.example", 403),
        ("host.docker.internal@evil.example", 403),
        ("evil@host.docker.internal", 403),
        ("docker.internal", 403),
    ] {
        let request =
            format!("GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        assert_eq!(house.raw(&request).status, status, "{host}");
    }
}

#[test]
fn the_key_is_read_from_each_header_that_clients_use() {
    let house = house_with(settings(1, 1, 1), |http| {
        http.api_key = ApiKey::new("0123456789abcdef");
    });
    for (headers, status) in [
        ("", 401),
        ("Authorization: Bearer 0123456789abcdef\r\n", 200),
        ("api-key: 0123456789abcdef\r\n", 200),
        ("x-api-key: 0123456789abcdef\r\n", 200),
        ("x-api-key: 0123456789abcdeF\r\n", 401),
        // Only the first one counts.
        (
            "x-api-key: 0123456789abcdef\r\nAuthorization: Bearer 0123456789abcdeF\r\n",
            401,
        ),
    ] {
        assert_eq!(house.get("/v1/models", headers).status, status, "{headers}");
    }
}

#[test]
fn additional_slashes_of_a_path_have_no_meaning() {
    let house = open();
    for path in ["/v1/models/", "//v1//models", "/v1/models//?limit=5"] {
        assert_eq!(house.get(path, "").json()["object"], "list", "{path}");
    }
    let body = ask(json!({})).to_string();
    let reply = house.raw(&post("/v1//chat/completions/", &body, CLOSE));
    assert_eq!(reply.status, 200);
    for path in ["/healthz", "/health", "/health/"] {
        assert_eq!(house.get(path, "").json()["status"], "ok", "{path}");
    }
    assert_eq!(house.get("//v2/", "").error().1, "unknown_url");
}

#[test]
fn a_response_has_the_id_of_its_request_or_a_new_one() {
    let house = open();
    let id = |headers: &str| house.get("/v1/none", headers).headers["x-request-id"].clone();
    assert_eq!(id("X-Request-Id: a-1\r\n"), "a-1");
    let (first, second) = (id(""), id(""));
    assert!(first.starts_with("req-") && first != second);
    for unfit in ["a b".to_owned(), "x".repeat(129)] {
        assert!(id(&format!("X-Request-Id: {unfit}\r\n")).starts_with("req-"));
    }
}

#[test]
fn a_compressed_body_is_refused_by_its_coding() {
    let house = open();
    let body = ask(json!({})).to_string();
    let send = |coding: &str| {
        let headers = format!("{CLOSE}Content-Encoding: {coding}\r\n");
        house.raw(&post("/v1/chat/completions", &body, &headers))
    };
    for coding in ["gzip", "br", "identity, gzip"] {
        let refused = (415, "unsupported_media_type".into(), String::new());
        assert_eq!(send(coding).error(), refused, "{coding}");
    }
    assert_eq!(send("identity").status, 200);
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
