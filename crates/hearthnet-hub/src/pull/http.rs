//! The `hf` source: a file over HTTP with resumption.
//!
//! A thread does the blocking I/O and sends the received blocks, so that a pull can be cancelled
//! while a server is silent. The thread ends with its next byte or timeout.

use std::fs;
use std::io::{self, Read};
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant, SystemTime};

use hearthnet_files::FileError;
use hearthnet_platform::{regular_file, whole_file};

use super::error::SourceError;
use super::job::{Job, PullEvent, TICK};
use super::options::PullOptions;
use super::sink::{Sink, Wanted};

/// Size of a block, and capacity of the channel in blocks.
const BLOCK: usize = 64 << 10;
const WAITING: usize = 16;
/// Longest entity tag that is sent back.
const MAX_ETAG_BYTES: u64 = 4096;

/// Attempts after which a server is given up, even if each of them delivered bytes.
const MAX_ATTEMPTS: u32 = 100;

pub(crate) type Request = ureq::RequestBuilder<ureq::typestate::WithoutBody>;
pub(crate) type Response = ureq::http::Response<ureq::Body>;

/// Error for the HTTP status of an answer.
pub(crate) fn refused(response: &Response) -> SourceError {
    match response.status().as_u16() {
        status @ (429 | 503) => SourceError::Busy {
            status,
            retry_after: header(response, "retry-after").and_then(retry_after),
        },
        status => SourceError::Status(status),
    }
}

/// Value of `Retry-After`: seconds, or a date (RFC 9110, section 10.2.3).
fn retry_after(value: &str) -> Option<Duration> {
    let value = value.trim();
    if let Ok(seconds) = value.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(value).ok()?;
    // A date in the past means at once.
    Some(date.duration_since(SystemTime::now()).unwrap_or_default())
}

/// Waits before the next attempt, after `idle` consecutive ones without progress.
///
/// # Errors
/// Returns `error` itself if another attempt would not help, or not soon enough.
fn wait_after(job: &mut Job<'_>, error: SourceError, idle: u32) -> Result<(), SourceError> {
    if !error.may_pass() || idle >= job.options.attempts {
        return Err(error);
    }
    let mut wait = job.options.backoff.saturating_mul(1 << (idle - 1).min(10));
    if let SourceError::Busy {
        status,
        retry_after,
    } = error
    {
        wait = wait.max(retry_after.unwrap_or_default());
        if wait > job.options.longest_wait {
            return Err(error);
        }
        (job.progress)(PullEvent::Busy { status, wait });
    }
    let until = Instant::now() + wait;
    while Instant::now() < until {
        job.check_cancelled()?;
        std::thread::sleep(TICK.min(until.saturating_duration_since(Instant::now())));
    }
    Ok(())
}

pub(super) fn fetch(job: &mut Job<'_>, url: &str) -> Result<(), SourceError> {
    let (part, etag) = (job.beside("part"), job.beside("part.etag"));

    let mut sink = Sink::resume(job.wanted, &part)?;
    let resumed = sink.done() > 0;
    let first = download(job, url, &mut sink, &etag).and_then(|()| sink.finish(&job.target));
    let result = match first {
        // The partial file may belong to another version: retry once from the beginning.
        Err(SourceError::Contents { .. } | SourceError::Length { .. }) if resumed => {
            let _ = fs::remove_file(&etag);
            let mut sink = Sink::resume(job.wanted, &part)?;
            sink.restart()?;
            download(job, url, &mut sink, &etag).and_then(|()| sink.finish(&job.target))
        }
        result => result,
    };
    if matches!(
        result,
        Err(SourceError::Contents { .. } | SourceError::Length { .. })
    ) {
        let _ = fs::remove_file(&part);
    }
    if !part.exists() {
        let _ = fs::remove_file(&etag);
    }
    result
}

/// Downloads the missing bytes, in as many attempts as necessary.
fn download(job: &mut Job<'_>, url: &str, sink: &mut Sink, etag: &Path) -> Result<(), SourceError> {
    let start = sink.done();
    let mut idle = 0;
    for _ in 0..MAX_ATTEMPTS {
        if sink.done() == job.wanted.bytes {
            return Ok(());
        }
        let before = sink.done();
        let Err(error) = attempt(job, url, sink, etag) else {
            return Ok(());
        };
        idle = if sink.done() > before { 1 } else { idle + 1 };
        // An address that was never reached most likely means no network: let other sources try
        // without delay.
        if matches!(error, SourceError::Unreachable { .. }) && sink.done() == start {
            return Err(error);
        }
        wait_after(job, error, idle)?;
    }
    Err(SourceError::Interrupted {
        done: sink.done(),
        total: job.wanted.bytes,
        reason: "too often".to_owned(),
    })
}

/// Sends one request, from the end of the partial file on.
fn attempt(
    job: &mut Job<'_>,
    url: &str,
    sink: &mut Sink,
    etag_path: &Path,
) -> Result<(), SourceError> {
    let (from, total) = (sink.done(), job.wanted.bytes);
    let interrupted = |done, reason: String| {
        Err(SourceError::Interrupted {
            done,
            total,
            reason,
        })
    };
    let mut request = get(job.options, url, 10);
    if from > 0 {
        request = request.header("Range", format!("bytes={from}-"));
        if let Ok(etag) = regular_file::read_text(etag_path, MAX_ETAG_BYTES) {
            request = request.header("If-Range", etag);
        }
    }
    let response = match in_thread(job.cancel, move || request.call())? {
        Ok(response) => response,
        Err(error) if reached(&error) => return interrupted(from, error.to_string()),
        Err(error) => return Err(unreachable(url, &error)),
    };
    match accept(&response, from, total)? {
        Accepted::Rest => {}
        Accepted::Whole => sink.restart()?,
        Accepted::Nothing => {
            sink.restart()?;
            let _ = fs::remove_file(etag_path);
            return interrupted(0, "the server has no such part".to_owned());
        }
    }
    remember(etag_path, header(&response, "etag"))?;
    let blocks = blocks(response)?;
    loop {
        match wait(job.cancel, &blocks)? {
            Ok(block) if !block.is_empty() => {
                sink.write(&block)?;
                job.report(sink.done());
            }
            Ok(_) if sink.done() == total => return Ok(()),
            Ok(_) => return interrupted(sink.done(), "the answer ended".to_owned()),
            Err(error) => return interrupted(sink.done(), error.to_string()),
        }
    }
}

/// Sends the blocks of an answer, then an empty one. The reading thread also ends when the receiver
/// is dropped.
fn blocks(response: Response) -> Result<Receiver<io::Result<Vec<u8>>>, SourceError> {
    let mut body = response.into_body().into_reader();
    let (sender, receiver) = sync_channel(WAITING);
    start(move || {
        loop {
            let mut block = vec![0; BLOCK];
            let read = match body.read(&mut block) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                read => read.map(|len| {
                    block.truncate(len);
                    block
                }),
            };
            let over = read.as_ref().map_or(true, Vec::is_empty);
            if sender.send(read).is_err() || over {
                return;
            }
        }
    })?;
    Ok(receiver)
}

enum Accepted {
    /// The answer continues the partial file.
    Rest,
    /// The answer is the file from its beginning.
    Whole,
    /// The server does not accept the range of the partial file.
    Nothing,
}

/// Checks status, length and range of an answer to a request for the bytes from `from` on.
fn accept(response: &Response, from: u64, total: u64) -> Result<Accepted, SourceError> {
    let (accepted, expected) = match response.status().as_u16() {
        200 => (Accepted::Whole, total),
        206 if from > 0 => {
            let range = header(response, "content-range").unwrap_or_default();
            let wrong = || SourceError::Answer(format!("it sends range {range:?}"));
            let (positions, size) = parse_range(range).ok_or_else(wrong)?;
            if *positions.start() != from {
                return Err(wrong());
            }
            if let Some(found) = size.filter(|size| *size != total) {
                return Err(SourceError::Length {
                    expected: total,
                    found,
                });
            }
            (Accepted::Rest, total - from)
        }
        416 if from > 0 => return Ok(Accepted::Nothing),
        _ => return Err(refused(response)),
    };
    let length = header(response, "content-length").and_then(|length| length.parse::<u64>().ok());
    match length {
        Some(found) if found != expected => Err(SourceError::Length {
            expected: total,
            found: found.saturating_add(total - expected),
        }),
        _ => Ok(accepted),
    }
}

/// Parses `bytes FIRST-LAST/TOTAL`, where the total may be `*`: the positions and the total.
pub(crate) fn parse_range(range: &str) -> Option<(RangeInclusive<u64>, Option<u64>)> {
    let (positions, total) = range.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = positions.split_once('-')?;
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    let total = match total {
        "*" => None,
        total => Some(total.parse().ok()?),
    };
    (first <= last).then_some((first..=last, total))
}

/// Stores the validator (ETag) of the partial file. A weak one does not guarantee equal bytes.
fn remember(path: &Path, etag: Option<&str>) -> Result<(), FileError> {
    match etag.filter(|etag| etag.starts_with('"')) {
        Some(etag) => whole_file::write(path, etag.as_bytes())
            .map_err(|error| FileError::new("write", path, error)),
        None => {
            let _ = fs::remove_file(path);
            Ok(())
        }
    }
}

/// Requests the size of a file. The hub's first answer, a redirect, also has the digest.
pub(super) fn probe(job: &mut Job<'_>, url: &str) -> Result<Wanted, SourceError> {
    let mut idle = 0;
    loop {
        let requests = [0, 10].map(|redirects| {
            let request = get(job.options, url, redirects);
            request.header("Range", "bytes=0-0")
        });
        let asked = url.to_owned();
        match in_thread(job.cancel, move || ask_for_size(requests, &asked))? {
            // No network, most likely.
            Err(error @ SourceError::Unreachable { .. }) => return Err(error),
            Err(error) => {
                idle += 1;
                wait_after(job, error, idle)?;
            }
            Ok(found) => return Ok(found),
        }
    }
}

fn answer(problem: &str) -> SourceError {
    SourceError::Answer(problem.to_owned())
}

fn ask_for_size(requests: [Request; 2], url: &str) -> Result<Wanted, SourceError> {
    let mut sha256 = None;
    for request in requests {
        let response = request.call().map_err(|error| unreachable(url, &error))?;
        let header = |name| header(&response, name);
        sha256 = sha256.or_else(|| header("x-linked-etag")?.trim_matches('"').parse().ok());
        let bytes = match response.status().as_u16() {
            206 => header("content-range").and_then(|range| parse_range(range)?.1),
            200 => header("content-length").and_then(|length| length.parse().ok()),
            300..=399 => continue,
            _ => return Err(refused(&response)),
        };
        return match bytes {
            Some(bytes) if bytes > 0 => Ok(Wanted { bytes, sha256 }),
            _ => Err(answer("it does not give the size of the file")),
        };
    }
    Err(answer("it leads elsewhere without end"))
}

/// Error for an unreachable server. It shows only scheme and host of the address.
pub(crate) fn unreachable(url: &str, error: &ureq::Error) -> SourceError {
    SourceError::Unreachable {
        address: url.split('/').take(3).collect::<Vec<_>>().join("/"),
        reason: error.to_string(),
    }
}

pub(crate) fn header<'a>(response: &'a Response, name: &str) -> Option<&'a str> {
    response.headers().get(name)?.to_str().ok()
}

fn get(options: &PullOptions, url: &str, redirects: u32) -> Request {
    request(&agent(options, url, redirects), options, url)
}

/// Client that follows `redirects` redirections, none of them from TLS to plain HTTP.
pub(crate) fn agent(options: &PullOptions, url: &str, redirects: u32) -> ureq::Agent {
    ureq::Agent::config_builder()
        .http_status_as_error(false)
        .max_redirects(redirects)
        .max_redirects_will_error(redirects > 0)
        // The target of the hub's redirect needs no token: its address is the permission.
        .redirect_auth_headers(ureq::config::RedirectAuthHeaders::SameHost)
        .https_only(url.starts_with("https://"))
        .user_agent(concat!("hearthnet/", env!("CARGO_PKG_VERSION")))
        .timeout_resolve(Some(options.connect_timeout))
        .timeout_connect(Some(options.connect_timeout))
        .timeout_per_read(Some(options.read_timeout))
        .timeout_per_write(Some(options.read_timeout))
        .build()
        .into()
}

pub(crate) fn request(agent: &ureq::Agent, options: &PullOptions, url: &str) -> Request {
    let request = agent.get(url).header("Accept-Encoding", "identity");
    match options.authorization(url) {
        Some(authorization) => request.header("Authorization", authorization),
        None => request,
    }
}

/// Starts a thread for blocking requests.
fn start(work: impl FnOnce() + Send + 'static) -> Result<(), SourceError> {
    let thread = std::thread::Builder::new().name("model-pull".to_owned());
    let started = thread.spawn(work).map(drop);
    started.map_err(|error| SourceError::Answer(format!("no thread for the transfer: {error}")))
}

/// Runs blocking work in a thread and waits for its result.
fn in_thread<T: Send + 'static>(
    cancel: &AtomicBool,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, SourceError> {
    let (sender, receiver) = sync_channel(1);
    // After a cancel, the receiver is gone.
    start(move || drop(sender.send(work())))?;
    wait(cancel, &receiver)
}

/// Next message of a thread, unless the pull is cancelled.
fn wait<T>(cancel: &AtomicBool, receiver: &Receiver<T>) -> Result<T, SourceError> {
    while !cancel.load(Ordering::Relaxed) {
        match receiver.recv_timeout(TICK) {
            Ok(sent) => return Ok(sent),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(answer("the transfer stopped")),
        }
    }
    Err(SourceError::Cancelled)
}

/// Whether a request without an answer reached the server. Without network, name, listener or
/// trust, a quick retry would not help.
pub(crate) fn reached(error: &ureq::Error) -> bool {
    use std::io::ErrorKind as Io;
    use ureq::{Error, Timeout};
    match error {
        Error::Io(error) => matches!(
            error.kind(),
            Io::ConnectionReset
                | Io::ConnectionAborted
                | Io::BrokenPipe
                | Io::UnexpectedEof
                | Io::TimedOut
                | Io::WouldBlock
        ),
        Error::HostNotFound
        | Error::ConnectionFailed
        | Error::ConnectProxyFailed(_)
        | Error::Timeout(Timeout::Resolve | Timeout::Connect)
        | Error::Tls(_)
        | Error::Rustls(_) => false,
        _ => true,
    }
}
