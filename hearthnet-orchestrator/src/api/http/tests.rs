//! HTTP interface over a tiny real model, tested through a socket. This file has the fixtures.

mod access;
mod answers;
mod apis;
mod exact;
mod load;
mod requests;
mod vectors;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;

use hearthnet_http::{ApiKey, Part};

use super::*;
use crate::api::fields::tests::cases;
use crate::api::fields::with;
use crate::service::ServiceSettings;
use crate::service::tests::{Fixture, TIMEOUT, fixture, settings};

/// Header of a request that is the last one on its connection.
const CLOSE: &str = "Connection: close\r\n";

/// A key, and the header with it.
const KEY: &str = "0123456789abcdef";
const BEARER: &str = "Authorization: Bearer 0123456789abcdef\r\n";

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

/// A house that serves requests with [`KEY`] only.
fn open_by_key() -> House {
    house_with(settings(2, 4, 4), |http| http.api_key = ApiKey::new(KEY))
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

    /// Seconds of `Retry-After`.
    fn retry_after(&self) -> u64 {
        self.headers["retry-after"].parse().unwrap()
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

    /// Sends a request without a body.
    fn send(&self, line: &str, host: &str, headers: &str) -> Reply {
        self.raw(&format!(
            "{line} HTTP/1.1\r\nHost: {host}\r\n{CLOSE}{headers}\r\n"
        ))
    }

    fn get(&self, path: &str, headers: &str) -> Reply {
        self.send(&format!("GET {path}"), "localhost", headers)
    }

    fn post(&self, path: &str, body: &Value) -> Reply {
        self.post_with(path, body, "")
    }

    fn post_with(&self, path: &str, body: &Value, headers: &str) -> Reply {
        let headers = format!("{CLOSE}{headers}");
        self.raw(&post(path, &body.to_string(), &headers))
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
