//! Models in several files.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use hearthnet_files::{Digest, ModelFile};
use hearthnet_hub::ModelRef;
use hearthnet_hub::catalogue::Catalogue;
use hearthnet_hub::parts::{LocalSource, Object, SplitSource};
use hearthnet_hub::pull::{PullError, PullOptions, SourceError, pull};
use hearthnet_testkit::{Adopted, TinyLlama, assert_matches, split, write_split};

use super::parts::{Source, all, get};
use super::server::{Answer, Request, Server, ranges, status};
use super::{Place, only_reason};

const FIRST: &str = "split-00001-of-00003.gguf";

fn files() -> Vec<Vec<u8>> {
    split(&TinyLlama::default().bytes(), 3)
}

/// File server for a folder.
fn folder(path: &Path) -> Answer {
    let path = path.to_owned();
    Box::new(move |request: &Request, stream| {
        let name = request.path.rsplit('/').next().unwrap();
        match fs::read(path.join(name)) {
            Ok(bytes) => ranges(&bytes)(request, stream),
            Err(_) => status("404 Not Found")(request, stream),
        }
    })
}

/// The files of a split model, in a folder and on a server.
fn served() -> (tempfile::TempDir, PathBuf, Server) {
    let published = tempfile::tempdir().unwrap();
    let path = write_split(published.path(), &files());
    let server = Server::new(vec![folder(published.path())]);
    (published, path, server)
}

#[test]
fn a_reference_to_the_first_file_fetches_all_the_first_one_last() {
    let (_published, _, server) = served();
    let place = Place::with(&server);
    let path = place.fetch(&format!("hf:a/b/{FIRST}"), None).unwrap();
    assert_eq!(path, place.options.models.join("hf/a/b").join(FIRST));
    ModelFile::open(&path).unwrap();
    let requests = server.requests();
    assert!(requests.last().unwrap().path.ends_with(FIRST));
    assert!(requests[0].path.ends_with("split-00003-of-00003.gguf"));
    place.fetch(&format!("hf:a/b/{FIRST}"), None).unwrap();
    assert_eq!(server.requests().len(), requests.len());

    let error = place
        .fetch("hf:a/b/split-00002-of-00003.gguf", None)
        .unwrap_err();
    assert!(matches!(error, PullError::NotFirst(_)) && error.to_string().contains(FIRST));
    let pinned = place.fetch(&format!("hf:a/b/{FIRST}"), Some(Digest([0; 32])));
    assert!(matches!(pinned, Err(PullError::SplitDigest)));
}

#[test]
fn each_file_of_an_entry_is_checked() {
    let (_published, path, server) = served();
    let files = files();
    let entry = |changed: Option<usize>| {
        let parts = files.iter().enumerate().map(|(index, file)| {
            let sha256 = match changed == Some(index) {
                true => Digest([7; 32]),
                false => Digest::of(file),
            };
            format!("{{ bytes = {}, sha256 = \"{sha256}\" }}", file.len())
        });
        let parts: Vec<String> = parts.collect();
        let bytes: usize = files.iter().map(Vec::len).sum();
        let text = format!(
            "[models.m]\nname = \"M\"\nlicense = \"MIT\"\nfile = \"{FIRST}\"\nbytes = {bytes}\n\
             parts = [{}]\nsources = [{{ kind = \"hf\", repository = \"a/b\", revision = \"c\", \
             file = \"d/{FIRST}\" }}]",
            parts.join(", ")
        );
        Catalogue::parse(&text).map(|catalogue| catalogue.get("m").unwrap().clone())
    };
    let go_on = AtomicBool::new(false);
    let place = Place::with(&server);
    let pulled = pull(&entry(None).unwrap(), &place.options, &go_on, &mut |_| {}).unwrap();
    ModelFile::open(&pulled).unwrap();

    let place = Place::with(&server);
    let changed = entry(Some(1)).unwrap();
    let error = only_reason(pull(&changed, &place.options, &go_on, &mut |_| {}));
    assert_matches!(error, SourceError::Contents { .. });
    assert!(!place.options.models.join("m").join(FIRST).exists());

    // From a drive, by the first file.
    let mut place = Place::new();
    place.options.from = Some(path);
    let pulled = pull(&entry(None).unwrap(), &place.options, &go_on, &mut |_| {}).unwrap();
    ModelFile::open(&pulled).unwrap();
}

#[test]
fn an_entry_names_the_size_of_every_file() {
    let with = |file: &str, parts: &str| {
        let digest = Digest([1; 32]);
        let parts = parts.replace('#', &digest.to_string());
        let text = format!(
            "[models.m]\nname = \"M\"\nlicense = \"MIT\"\nfile = \"{file}\"\nbytes = 9\n\
             parts = [{parts}]\nsources = [{{ kind = \"file\", path = \"~/{file}\" }}]"
        );
        Catalogue::parse(&text)
    };
    let two = "{ bytes = 4, sha256 = \"#\" }, { bytes = 5, sha256 = \"#\" }";
    with("m-00001-of-00002.gguf", two).unwrap();
    for (file, parts) in [
        ("m-00001-of-00002.gguf", ""),
        ("m-00001-of-00003.gguf", two),
        ("m-00002-of-00002.gguf", two),
        ("m.gguf", two),
        (
            "m-00001-of-00002.gguf",
            "{ bytes = 4, sha256 = \"#\" }, { bytes = 4, sha256 = \"#\" }",
        ),
    ] {
        let error = with(file, parts).unwrap_err().to_string();
        assert!(error.contains("models.m.parts"), "{error}");
    }
}

#[test]
fn pieces_come_from_the_files_on_a_server_and_on_a_drive() {
    let (_published, path, server) = served();
    let adopted = Adopted::of(ModelFile::open(&path).unwrap());
    let identity = &adopted.identity;

    let text = format!("{}/d/{FIRST}", server.address);
    let Ok(ModelRef::Remote(remote)) = text.parse() else {
        panic!("{text}");
    };
    assert!(remote.is_split());
    let options = PullOptions::new(PathBuf::new());
    let parts = adopted.parts.path();
    let sources: [Source; 2] = [
        Arc::new(SplitSource::new(&remote, &options, identity)),
        Arc::new(LocalSource::new(&path, identity, parts)),
    ];
    for (source, place) in sources.into_iter().zip(["a", "b"]) {
        let head = source.object(Object::Head, 0, u32::MAX).unwrap().unwrap();
        assert!(head[..identity.head_bytes as usize] == *adopted.head());
        let part = adopted.create_in(&parts.join(place)).unwrap();
        get(&part, &all(&part), vec![source]).unwrap();
        adopted.assert_holds(&part, &all(&part));
    }

    fs::remove_file(path.with_file_name("split-00002-of-00003.gguf")).unwrap();
    let source = SplitSource::new(&remote, &options, identity);
    let error = hearthnet_hub::parts::PieceSource::pieces(&source).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("split-00002-of-00003.gguf is missing"),
        "{error}"
    );
}
