//! A small client of the HTTP interface, whose connection the test has in its own hands.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{PATIENCE, Server};

/// Where a service listens for HTTP.
pub(crate) fn address(server: &Server) -> String {
    let url = server.ready["url"].as_str().expect("a URL");
    let address = url.trim_start_matches("http://").trim_end_matches("/v1");
    address.to_owned()
}

/// What a server answers at a path, which must be there.
pub(crate) fn get(address: &str, path: &str) -> String {
    let asked = Instant::now();
    let request = send(address, &format!("GET {path} HTTP/1.1\r\n"), None);
    let mut reply = Reply::head(asked, request);
    assert_eq!(reply.status, 200, "{path}");
    reply.text()
}

/// The same as JSON.
pub(crate) fn get_json(address: &str, path: &str) -> Value {
    serde_json::from_str(&get(address, path)).expect("JSON")
}

/// Sends a request for an answer to a conversation; of the answer nothing is read.
pub(crate) fn post_chat(address: &str, body: &Value) -> TcpStream {
    let head = "POST /v1/chat/completions HTTP/1.1\r\nContent-Type: application/json\r\n";
    send(address, head, Some(&body.to_string()))
}

fn send(address: &str, head: &str, body: Option<&str>) -> TcpStream {
    let mut stream = TcpStream::connect(address).expect("the service listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
    let body = body.unwrap_or_default();
    let length = body.len();
    let request = format!(
        "{head}Host: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).expect("a socket");
    stream
}

/// An answer whose head has come.
pub(crate) struct Reply {
    /// When it was asked for.
    pub(crate) asked: Instant,
    pub(crate) status: u16,
    pub(crate) retry_after: Option<Duration>,
    /// Whether it says that this machine answered alone.
    pub(crate) alone: bool,
    body: BufReader<TcpStream>,
}

impl Reply {
    /// Asks for an answer to a conversation.
    pub(crate) fn chat(address: &str, body: &Value) -> Self {
        let asked = Instant::now();
        Self::head(asked, post_chat(address, body))
    }

    fn head(asked: Instant, stream: TcpStream) -> Self {
        let mut body = BufReader::new(stream);
        let mut line = String::new();
        body.read_line(&mut line).expect("a status");
        let status = line.split(' ').nth(1).and_then(|code| code.parse().ok());
        let (mut retry_after, mut alone) = (None, false);
        loop {
            line.clear();
            body.read_line(&mut line).expect("a header");
            match line.trim_end().split_once(": ") {
                Some((name, seconds)) if name.eq_ignore_ascii_case("retry-after") => {
                    retry_after = seconds.parse().ok().map(Duration::from_secs);
                }
                Some((name, who)) if name.eq_ignore_ascii_case("x-hearthnet-answered-by") => {
                    assert_eq!(who, "this-machine");
                    alone = true;
                }
                Some(_) => {}
                None => break,
            }
        }
        Self {
            asked,
            status: status.unwrap_or_else(|| panic!("no status: {line}")),
            retry_after,
            alone,
            body,
        }
    }

    /// The whole body.
    pub(crate) fn text(&mut self) -> String {
        let mut text = String::new();
        self.body.read_to_string(&mut text).expect("a body");
        text
    }

    /// The next event of a stream; `None` after `[DONE]`. (Chunks of the transfer are lines of
    /// their own, which are passed over.)
    pub(crate) fn event(&mut self) -> Option<Value> {
        let mut line = String::new();
        loop {
            line.clear();
            let read = self.body.read_line(&mut line).expect("an event");
            assert!(read > 0, "the stream ended without [DONE]");
            match line.trim_end().strip_prefix("data: ") {
                Some("[DONE]") => return None,
                Some(event) => return Some(serde_json::from_str(event).expect("JSON")),
                None => {}
            }
        }
    }
}
