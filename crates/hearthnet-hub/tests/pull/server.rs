//! Small HTTP server with scripted answers.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

use parking_lot::Mutex;

/// Received request.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) path: String,
    pub(crate) headers: BTreeMap<String, String>,
}

impl Request {
    /// First position of the requested range, and the last one if it is stated.
    pub(crate) fn range(&self) -> Option<(usize, Option<usize>)> {
        let range = self.headers.get("range")?.strip_prefix("bytes=").unwrap();
        let (from, last) = range.split_once('-').unwrap();
        Some((from.parse().unwrap(), last.parse().ok()))
    }

    /// First position of the requested range.
    pub(crate) fn from(&self) -> usize {
        self.range().map_or(0, |(from, _)| from)
    }
}

pub(crate) type Answer = Box<dyn Fn(&Request, &mut TcpStream) + Send>;

/// Answers each request, on a connection of its own, with the next of `answers`; the last one is
/// repeated.
pub(crate) struct Server {
    pub(crate) address: String,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    pub(crate) fn new(answers: Vec<Answer>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&requests);
        std::thread::spawn(move || {
            for (index, stream) in listener.incoming().enumerate() {
                let mut stream = stream.unwrap();
                let Some(request) = read(&stream) else {
                    continue;
                };
                seen.lock().push(request.clone());
                answers[index.min(answers.len() - 1)](&request, &mut stream);
            }
        });
        Self { address, requests }
    }

    pub(crate) fn requests(&self) -> Vec<Request> {
        self.requests.lock().clone()
    }
}

fn read(stream: &TcpStream) -> Option<Request> {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let path = lines.next()?.split(' ').nth(1)?.to_owned();
    let headers = lines
        .take_while(|line| !line.is_empty())
        .filter_map(|line| {
            let (name, value) = line.split_once(':')?;
            Some((name.to_ascii_lowercase(), value.trim().to_owned()))
        })
        .collect();
    Some(Request { path, headers })
}

/// Answer with this status line, headers and body, after which the connection is closed. A client
/// notices a declared length that exceeds the body.
pub(crate) fn answer(status: &str, headers: &[String], body: &[u8]) -> Answer {
    let mut bytes = format!("HTTP/1.1 {status}\r\nConnection: close\r\n");
    for header in headers {
        bytes += &format!("{header}\r\n");
    }
    bytes += "\r\n";
    let bytes = [bytes.as_bytes(), body].concat();
    Box::new(move |_, stream| {
        // The client may hang up early.
        let _ = stream.write_all(&bytes);
    })
}

/// File server: all of `file`, or the part from the start of the requested range.
pub(crate) fn file(file: &[u8]) -> Answer {
    let file = file.to_vec();
    Box::new(move |request, stream| {
        let (from, all) = (request.from(), file.len());
        let length = format!("Content-Length: {}", all - from);
        let etag = "ETag: \"one\"".to_owned();
        let part = format!("Content-Range: bytes {from}-{}/{all}", all - 1);
        let (status, range) = match from {
            0 => ("200 OK", "Accept-Ranges: bytes".to_owned()),
            _ => ("206 Partial Content", part),
        };
        answer(status, &[length, etag, range], &file[from..])(request, stream);
    })
}

/// File server: all of `file`, or the requested range, of which it sends `most` bytes before it
/// closes the connection.
pub(crate) fn range_up_to(file: &[u8], most: usize) -> Answer {
    let file = file.to_vec();
    Box::new(move |request, stream| {
        let all = file.len();
        let Some((from, last)) = request.range() else {
            let length = format!("Content-Length: {all}");
            return answer("200 OK", &[length], &file)(request, stream);
        };
        let last = last.unwrap_or(all).min(all - 1);
        let body = &file[from..=last];
        let headers = [
            format!("Content-Length: {}", body.len()),
            format!("Content-Range: bytes {from}-{last}/{all}"),
        ];
        let body = &body[..body.len().min(most)];
        answer("206 Partial Content", &headers, body)(request, stream);
    })
}

pub(crate) fn ranges(file: &[u8]) -> Answer {
    range_up_to(file, usize::MAX)
}

/// Refuses temporarily, with a time for the next attempt.
pub(crate) fn busy(status: &str, retry_after: &str) -> Answer {
    let headers = [
        "Content-Length: 0".to_owned(),
        format!("Retry-After: {retry_after}"),
    ];
    answer(status, &headers, b"")
}

/// Declares the whole of `file`, and closes the connection after `len` bytes.
pub(crate) fn cut(file: &[u8], len: usize) -> Answer {
    let headers = [
        format!("Content-Length: {}", file.len()),
        "ETag: \"one\"".to_owned(),
    ];
    answer("200 OK", &headers, &file[..len])
}

/// Sends `len` bytes of `file`, and keeps the silent connection open.
pub(crate) fn silent(file: &[u8], len: usize) -> Answer {
    let begin = cut(file, len);
    let open = Mutex::new(Vec::new());
    Box::new(move |request, stream| {
        begin(request, stream);
        open.lock().push(stream.try_clone().unwrap());
    })
}

pub(crate) fn status(status: &str) -> Answer {
    answer(status, &["Content-Length: 0".to_owned()], b"")
}

pub(crate) fn redirect(to: &str) -> Answer {
    let headers = ["Content-Length: 0".to_owned(), format!("Location: {to}")];
    answer("302 Found", &headers, b"")
}
