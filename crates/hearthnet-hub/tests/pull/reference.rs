//! References outside the catalogue: a file on the hub or at an address.

use std::fs;

use hearthnet_files::Digest;
use hearthnet_hub::pull::{PullError, SourceError, Token};
use hearthnet_testkit::assert_matches;

use super::server::{Answer, Server, answer, busy, cut, file, redirect, status};
use super::{HALF, Place, model, only_reason};

const REFERENCE: &str = "hf:a/b/d/m.gguf";

/// Response with the file's size, given in a redirect as by the hub.
fn size(sha256: &Digest) -> Answer {
    let headers = [
        "Location: /elsewhere".to_owned(),
        format!("X-Linked-Size: {}", model().len()),
        format!("X-Linked-ETag: \"{sha256}\""),
    ];
    answer("302 Found", &headers, b"")
}

/// Response with the first byte and the total size.
fn first_byte() -> Answer {
    let range = format!("Content-Range: bytes 0-0/{}", model().len());
    answer("206 Partial Content", &[range], &model()[..1])
}

#[test]
fn a_hub_reference_is_fetched_checked_by_the_hubs_digest_and_reused() {
    // Requests: for the digest, for the redirect, for its target, and for the file.
    let digest = Digest::of(&model());
    let answers = vec![size(&digest), size(&digest), first_byte(), file(&model())];
    let server = Server::new(answers);
    let place = Place::with(&server);
    let path = place.fetch(REFERENCE, None).unwrap();
    assert_eq!(path, place.options.models.join("hf/a/b/d/m.gguf"));
    assert!(fs::read(&path).unwrap() == model());
    let paths: Vec<_> = server.requests().iter().map(|r| r.path.clone()).collect();
    let asked = "/a/b/resolve/main/d/m.gguf";
    assert_eq!(paths, [asked, asked, "/elsewhere", asked]);
    // The file exists now, so no request is sent.
    assert_eq!(place.fetch(REFERENCE, None).unwrap(), path);
    assert_eq!(server.requests().len(), 4);
}

#[test]
fn a_busy_hub_is_retried_when_asked_for_the_size() {
    let busy = || busy("429 Too Many Requests", "0");
    let digest = Digest::of(&model());
    let server = Server::new(vec![
        busy(),
        size(&digest),
        busy(),
        size(&digest),
        first_byte(),
        file(&model()),
    ]);
    let place = Place::with(&server);
    place.fetch(REFERENCE, None).unwrap();

    let server = Server::new(vec![busy()]);
    let place = Place::with(&server);
    let error = only_reason(place.fetch(REFERENCE, None));
    assert_matches!(error, SourceError::Busy { status: 429, .. });
    assert_eq!(server.requests().len(), 4, "it is not asked without end");
}

#[test]
fn bytes_with_another_digest_are_refused_and_removed() {
    for (told, pinned) in [
        (Digest([7; 32]), None),
        (Digest::of(&model()), Some(Digest([8; 32]))),
    ] {
        let server = Server::new(vec![size(&told), first_byte(), file(&model())]);
        let place = Place::with(&server);
        let error = only_reason(place.fetch(REFERENCE, pinned));
        assert!(matches!(error, SourceError::Contents { .. }), "{error}");
        let left = fs::read_dir(place.options.models.join("hf/a/b/d")).unwrap();
        let left: Vec<_> = left.map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, [".lock"]);
    }
}

#[test]
fn an_address_is_fetched_and_resumed() {
    let server = Server::new(vec![first_byte(), cut(&model(), HALF), file(&model())]);
    let place = Place::new();
    let path = place
        .fetch(&format!("{}/x/m.gguf?y=1", server.address), None)
        .unwrap();
    assert!(fs::read(&path).unwrap() == model());
    let requests = server.requests();
    assert!(requests.iter().all(|r| r.path == "/x/m.gguf?y=1"));
    assert_eq!(requests[2].from(), HALF);
}

#[test]
fn a_missing_file_and_a_missing_size_are_reported() {
    let refused = |answer| {
        let server = Server::new(vec![answer]);
        only_reason(Place::with(&server).fetch(REFERENCE, None))
    };
    let error = refused(status("404 Not Found"));
    assert!(matches!(error, SourceError::Status(404)), "{error}");
    let error = refused(answer("206 Partial Content", &[], b"x"));
    assert!(matches!(error, SourceError::Answer(_)), "{error}");
    let error = refused(redirect("/again"));
    assert_matches!(
        error,
        SourceError::Unreachable { .. } | SourceError::Answer(_)
    );
}

#[test]
fn an_unpinned_reference_needs_tls_or_this_machine() {
    let mut place = Place::new();
    // The address does not exist; no request may be sent.
    place.options.hub = "http://hub.invalid".to_owned();
    let error = place.fetch(REFERENCE, None).unwrap_err();
    assert!(matches!(error, PullError::Unprotected(_)), "{error:?}");
    let error = only_reason(place.fetch(REFERENCE, Some(Digest([0; 32]))));
    assert_matches!(error, SourceError::Unreachable { .. });
}

#[test]
fn the_token_is_sent_only_to_the_hub() {
    let refusal = status("401 Unauthorized");
    let hub = Server::new(vec![refusal, first_byte(), file(&model())]);
    let mut place = Place::with(&hub);
    let refused = only_reason(place.fetch(REFERENCE, None));
    assert!(matches!(refused, SourceError::Status(401)), "{refused}");
    place.options.token = Token::new(" hf_secret\n".to_owned());
    place.fetch(REFERENCE, None).unwrap();
    let told = |server: &Server| -> Vec<Option<String>> {
        let of = |r: &super::server::Request| r.headers.get("authorization").cloned();
        server.requests().iter().map(of).collect()
    };
    let bearer = Some("Bearer hf_secret".to_owned());
    assert_eq!(told(&hub), [None, bearer.clone(), bearer]);
    assert_eq!(format!("{:?}", place.options.token), "Some(Token(..))");

    let other = Server::new(vec![first_byte(), file(&model())]);
    place
        .fetch(&format!("{}/m.gguf", other.address), None)
        .unwrap();
    assert_eq!(told(&other), [None, None]);
    assert!(Token::new("a\nb".to_owned()).is_none());
}
