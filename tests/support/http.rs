//! Small client of the HTTP interface, with full control of its connection.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{Home, Server, TIMEOUT, chmod};

/// Key of a service, in a file.
pub(crate) const KEY: &str = "a-key+of/16=bytes";

/// Setting that names a new file with [`KEY`].
pub(crate) fn with_key(home: &Home) -> String {
    let path = home.path().join("http.key");
    std::fs::write(&path, KEY).expect("a file");
    chmod(&path, 0o600);
    format!("http.api_key_file={}", path.display())
}

/// HTTP address of a service.
pub(crate) fn address(server: &Server) -> String {
    let url = server.ready["url"].as_str().expect("a URL");
    let address = url.trim_start_matches("http://").trim_end_matches("/v1");
    address.to_owned()
}

/// Status and body at a path.
pub(crate) fn answer(address: &str, path: &str) -> (u16, String) {
    let asked = Instant::now();
    let request = send(address, &format!("GET {path} HTTP/1.1\r\n"), None);
    let mut reply = Reply::head(asked, request);
    (reply.status, reply.text())
}

/// Body at a path, which must exist.
pub(crate) fn get(address: &str, path: &str) -> String {
    let (status, body) = answer(address, path);
    assert_eq!(status, 200, "{path}");
    body
}

/// JSON body at a path.
pub(crate) fn get_json(address: &str, path: &str) -> Value {
    serde_json::from_str(&get(address, path)).expect("JSON")
}

/// Status and JSON body of the answer to a JSON body that is sent to a path.
pub(crate) fn post_json(address: &str, path: &str, body: &Value) -> (u16, Value) {
    post_json_with(address, path, "", body)
}

/// As [`post_json`], with further lines of the head, each of which ends with CRLF.
pub(crate) fn post_json_with(address: &str, path: &str, lines: &str, body: &Value) -> (u16, Value) {
    let asked = Instant::now();
    let head = format!("POST {path} HTTP/1.1\r\nContent-Type: application/json\r\n{lines}");
    let mut reply = Reply::head(asked, send(address, &head, Some(&body.to_string())));
    let body = serde_json::from_str(&reply.text()).expect("JSON");
    (reply.status, body)
}

/// Sends a chat request without reading the answer.
pub(crate) fn post_chat(address: &str, body: &Value) -> TcpStream {
    let head = "POST /v1/chat/completions HTTP/1.1\r\nContent-Type: application/json\r\n";
    send(address, head, Some(&body.to_string()))
}

fn send(address: &str, head: &str, body: Option<&str>) -> TcpStream {
    let mut stream = TcpStream::connect(address).expect("the service listens");
    stream.set_read_timeout(Some(TIMEOUT)).expect("a socket");
    let body = body.unwrap_or_default();
    let length = body.len();
    let request = format!(
        "{head}Host: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).expect("a socket");
    stream
}

/// Answer whose head has arrived.
pub(crate) struct Reply {
    /// Time of the request.
    pub(crate) asked: Instant,
    pub(crate) status: u16,
    pub(crate) retry_after: Option<Duration>,
    /// Whether the header says that this machine answered alone.
    pub(crate) alone: bool,
    /// Whether the body has the chunked transfer coding.
    is_chunked: bool,
    body: BufReader<TcpStream>,
}

impl Reply {
    /// Sends a chat request and reads the head of the answer.
    pub(crate) fn chat(address: &str, body: &Value) -> Self {
        let asked = Instant::now();
        Self::head(asked, post_chat(address, body))
    }

    fn head(asked: Instant, stream: TcpStream) -> Self {
        let mut body = BufReader::new(stream);
        let mut line = String::new();
        body.read_line(&mut line).expect("a status");
        let status = line.split(' ').nth(1).and_then(|code| code.parse().ok());
        let (mut retry_after, mut alone, mut is_chunked) = (None, false, false);
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
                Some((name, "chunked")) => {
                    is_chunked |= name.eq_ignore_ascii_case("transfer-encoding");
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
            is_chunked,
            body,
        }
    }

    /// Whole body.
    pub(crate) fn text(&mut self) -> String {
        let mut text = Vec::new();
        if !self.is_chunked {
            self.body.read_to_end(&mut text).expect("a body");
        }
        while self.is_chunked {
            let mut line = String::new();
            self.body.read_line(&mut line).expect("the size of a chunk");
            let size = usize::from_str_radix(line.trim_end(), 16).expect("a size");
            // The chunk and its CRLF.
            let start = text.len();
            text.resize(start + size + 2, 0);
            self.body.read_exact(&mut text[start..]).expect("a chunk");
            text.truncate(start + size);
            if size == 0 {
                break;
            }
        }
        String::from_utf8(text).expect("UTF-8")
    }

    /// Next event of a stream; `None` after `[DONE]`. Lines of the chunked transfer coding are
    /// skipped.
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
